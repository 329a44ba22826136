/* autograd on fake CUDA tensors without a driver, loaded ahead of torch (LD_PRELOAD), for torch 2.14.
 *
 * Its engine notes the streams of "the accelerator" before a backward pass, for which it asks the driver about a device
 * that is not there, and synchronises with the stream of each node. Here there is no accelerator, so no streams; code
 * that insists on one (checked) gets CUDA, as a CUDA build answers. Types: std::optional<c10::DeviceType> is a byte and,
 * above it, whether there is one; CUDA is 1.
 */
unsigned short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { return checked ? 0x0101 : 0; }

_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) {
    (void)type;
    return 0;
}
