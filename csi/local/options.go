package local

import (
	"errors"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/mountoption"
)

// checkImageOptions returns an error for invalid mount options before the volume is created.
// Otherwise its pods would wait forever.
func checkImageOptions(caps []*csi.VolumeCapability) error {
	for _, c := range caps {
		_, rest := mountoption.SplitFlags(c.GetMount().GetMountFlags())
		if err := checkMountOptions("ext4", rest); err != nil {
			return status.Errorf(codes.InvalidArgument, "%v: correct the mountOptions of the claim's StorageClass", err)
		}
	}
	return nil
}

// checkMountOptions checks with the kernel whether a file system type accepts mount options,
// without mounting anything. If the kernel cannot check (before 5.2, or without CAP_SYS_ADMIN), it
// returns nil, and the mount fails later. Conflicts between options and the content of a file
// system are also found only by the mount.
func checkMountOptions(kind string, options []string) error {
	if len(options) == 0 {
		return nil
	}
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil
	}
	defer unix.Close(fs)
	// fsconfig refuses some options if the source is not set.
	if err := unix.FsconfigSetString(fs, "source", "none"); err != nil {
		return nil
	}
	for _, o := range options {
		name, value, is := strings.Cut(o, "=")
		if is {
			err = unix.FsconfigSetString(fs, name, value)
		} else {
			err = unix.FsconfigSetFlag(fs, name)
		}
		if err != nil && !errors.Is(err, unix.EPERM) {
			return fmt.Errorf("mount option %q is none that %s can be mounted with (%s)", o, kind, kernelMessage(fs, err))
		}
	}
	return nil
}

// kernelMessage returns the kernel's message about a failed fsconfig call, or the text of err if
// none exists.
func kernelMessage(fs int, err error) string {
	var b [256]byte // one message per read, such as "e ext4: Unknown parameter 'x'"
	n, none := unix.Read(fs, b[:])
	if none != nil || n < 3 {
		return err.Error()
	}
	return strings.TrimSpace(string(b[2:n]))
}
