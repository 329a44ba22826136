-- The state machine of a weight group. Each operation answers {status, epoch, ...}; the statuses are
--   ok        done; lead: the third value is the holder's token
--   unknown   heartbeat, bind, confirm: the slot is free (the lease ran out, or Redis lost its data); heartbeat: or
--             its facts are lost. A claim helps
--   held      claim, lead: a live worker has the slot (third value)
--   evicted   another worker has the slot (lead: has had it since): the caller changes nothing
--   stale     bind, confirm: the epoch is over for these slots: one of them has changed since
--   damaged   a field of state (third value) is no number (fourth value): nothing was changed
-- KEYS: members (hash slot -> worker id), leases (zset slot -> expiry in ms), state (hash: epoch, endpoint_epoch,
-- endpoint, token, leader, longest: ms of the longest lease ever given), facts (hash slot -> what its holder tells of
-- itself), since (hash slot -> the epoch that its holder has made by taking it). ARGV[1] names the operation. Redis TIME
-- is the only clock; every change of the membership makes a new epoch, and a caller that no longer holds its slot
-- changes nothing.
local members, leases, state, facts, since = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local EXACT = 2 ^ 53 -- Lua's numbers are doubles

-- What another program, or a damaged dump, has left here must be repaired by a person. Nothing is changed before: a key
-- of another type fails here, and not halfway through an operation.
for _, key in ipairs({members, state, facts, since}) do redis.call('HGET', key, '') end
for _, field in ipairs({'epoch', 'token', 'longest'}) do
  local text = redis.call('HGET', state, field)
  if text and (not string.match(text, '^%d+$') or tonumber(text) > EXACT) then return {'damaged', 0, field, text} end
end

-- An empty Redis begins at its clock (us: an epoch takes longer than that to make), so that epochs grow even if it has
-- lost its data: no number comes twice.
local function new_epoch()
  redis.call('HSETNX', state, 'epoch', string.format('%d', time[1] * 1000000 + time[2]))
  return redis.call('HINCRBY', state, 'epoch', 1)
end

-- A group with members always has an epoch, also after the loss of its state.
local function epoch()
  local now_is = redis.call('HGET', state, 'epoch')
  if not now_is and #redis.call('ZRANGEBYSCORE', leases, '-inf', '+inf', 'LIMIT', 0, 1) > 0 then return new_epoch() end
  return tonumber(now_is or '0')
end

-- Whether a slot's facts are there, in a form that others can read.
local function has_facts(slot)
  local read, found = pcall(cjson.decode, redis.call('HGET', facts, slot) or '')
  return read and type(found) == 'table'
end

local function remove(slot)
  redis.call('HDEL', members, slot)
  redis.call('ZREM', leases, slot)
  redis.call('HDEL', facts, slot)
  redis.call('HDEL', since, slot)
end

-- Gives a slot to a worker, which is a new epoch.
local function take(slot, worker)
  redis.call('HSET', members, slot, worker)
  redis.call('HSET', since, slot, string.format('%d', new_epoch()))
end

-- Whether a slot has changed since an epoch; a member whose own epoch is lost: whether any has.
local function has_changed(slot, at)
  local taken = tonumber(redis.call('HGET', since, slot) or '') or epoch()
  return not redis.call('HGET', members, slot) or taken > at
end

-- A lease that ends later than any that is given now was given before the clock was set back: the dead would keep their
-- slots until it has caught up. It begins anew; it is no shorter than its holder was promised.
local longest = tonumber(redis.call('HGET', state, 'longest') or '0')
for _, slot in ipairs(longest > 0 and redis.call('ZRANGEBYSCORE', leases, '(' .. now + longest, '+inf') or {}) do
  redis.call('ZADD', leases, now + longest, slot)
end

-- What a run leaves expires. A week without a call is longer than any run waits for its Redis or its processes.
local KEPT_S = 604800
local function renew(slot, ttl)
  redis.call('ZADD', leases, now + ttl, slot)
  if ttl > longest then
    -- Where the state is lost, others may have been given longer ones.
    local all = longest == 0 and redis.call('ZRANGEBYSCORE', leases, '-inf', '+inf', 'WITHSCORES')
    local most = all and math.min(all[#all] - now, 1000 * KEPT_S) or ttl
    redis.call('HSET', state, 'longest', string.format('%d', most))
  end
  for _, key in ipairs(KEYS) do redis.call('EXPIRE', key, KEPT_S) end
end

local expired = redis.call('ZRANGEBYSCORE', leases, '-inf', now)
for _, slot in ipairs(expired) do remove(slot) end
if #expired > 0 then new_epoch() end

local operation, slot, worker = ARGV[1], ARGV[2], ARGV[3]
local holder = slot and redis.call('HGET', members, slot)

if operation == 'join' or operation == 'claim' then
  -- join: a new incarnation takes the slot over immediately; waiting for the old lease would cost its whole TTL.
  -- claim: an empty slot only. A process without contact for long does not know whether a newer incarnation exists.
  if operation == 'claim' and holder and holder ~= worker then return {'held', epoch(), holder} end
  if holder ~= worker then take(slot, worker) end
  redis.call('HSET', facts, slot, ARGV[5])
  renew(slot, tonumber(ARGV[4]))
  return {'ok', epoch()}
end

if operation == 'lead' then
  -- A claim of the coordinator's slot. ARGV[5] is the token that the worker has from an earlier claim, or 0. Tokens grow
  -- from holder to holder, also over a loss of data: they begin at the clock. Who lost its slot for a while takes it
  -- again under its old token, unless another has led the run meanwhile.
  if holder and holder ~= worker then return {'held', epoch(), holder} end
  local newest, token = tonumber(redis.call('HGET', state, 'token') or '0'), tonumber(ARGV[5])
  if token == 0 and holder == worker then token = newest end -- the reply to its claim was lost
  if token ~= 0 and newest > token then return {'evicted', epoch()} end
  if token == 0 then token = math.max(now, newest + 1) end
  if not holder then take(slot, worker) end
  redis.call('HSET', state, 'token', string.format('%d', token), 'leader', worker)
  redis.call('HSET', facts, slot, '{}')
  renew(slot, tonumber(ARGV[4]))
  return {'ok', epoch(), token}
end

if operation == 'leader' then
  -- Whose the newest token is, alive or not.
  local newest = redis.call('HMGET', state, 'token', 'leader')
  return {'ok', epoch(), newest[1] or '0', newest[2] or ''}
end

if operation == 'heartbeat' then
  if not holder then return {'unknown', epoch()} end
  if holder ~= worker then return {'evicted', epoch()} end
  if not has_facts(slot) then return {'unknown', epoch()} end -- lost: the claim that follows writes them
  renew(slot, tonumber(ARGV[4]))
  return {'ok', epoch()}
end

if operation == 'leave' then
  if holder ~= worker then return {'evicted', epoch()} end
  remove(slot)
  return {'ok', new_epoch()}
end

if operation == 'confirm' then
  -- ARGV[4] is the epoch that the caller is about to act in, with the slots from ARGV[5] on.
  if not holder then return {'unknown', epoch()} end
  if holder ~= worker then return {'evicted', epoch()} end
  if tonumber(ARGV[4]) > epoch() then return {'stale', epoch()} end
  for i = 5, #ARGV do
    if has_changed(ARGV[i], tonumber(ARGV[4])) then return {'stale', epoch()} end
  end
  return {'ok', epoch()}
end

if operation == 'bind' then
  -- ARGV[4] is the epoch that the endpoint was made for, ARGV[5] its address. It does not replace a later one.
  if not holder then return {'unknown', epoch()} end
  if holder ~= worker then return {'evicted', epoch()} end
  local bound = tonumber(redis.call('HGET', state, 'endpoint_epoch') or '') or 0
  local at = tonumber(ARGV[4])
  if at > epoch() or (at < bound and bound <= epoch()) or has_changed(slot, at) then return {'stale', epoch()} end
  redis.call('HSET', state, 'endpoint_epoch', ARGV[4], 'endpoint', ARGV[5])
  return {'ok', epoch()}
end

if operation == 'snapshot' then
  local endpoint = redis.call('HMGET', state, 'endpoint_epoch', 'endpoint')
  return {'ok', epoch(), endpoint[1] or '', endpoint[2] or '', redis.call('HGETALL', members), redis.call('HGETALL', since)}
end

if operation == 'facts' then
  return {'ok', epoch(), redis.call('HGETALL', facts)}
end

return redis.error_reply('unknown operation ' .. tostring(operation))
