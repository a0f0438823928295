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

// checkImageOptions returns an error if the capabilities of a new volume contain mount options that
// ext4 does not accept. A volume with such options could never be mounted, so the caller must not
// create it.
func checkImageOptions(caps []*csi.VolumeCapability) error {
	for _, c := range caps {
		_, rest := mountoption.SplitFlags(c.GetMount().GetMountFlags())
		if err := checkMountOptions("ext4", rest); err != nil {
			return status.Errorf(codes.InvalidArgument, "%v: correct the mountOptions of the claim's StorageClass", err)
		}
	}
	return nil
}

// checkMountOptions returns an error if the kernel does not accept one of the mount options for the
// file system type kind. It mounts nothing. If the kernel cannot check options (before 5.2, or
// without CAP_SYS_ADMIN), it returns nil, and the mount fails later. The mount also fails if
// options conflict with the content of the file system.
func checkMountOptions(kind string, options []string) error {
	if len(options) == 0 {
		return nil
	}
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil
	}
	defer unix.Close(fs)
	// Without a source, fsconfig refuses some valid options.
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
			return fmt.Errorf("mount option %q is not valid for %s (%s)", o, kind,
				kernelMessage(fs, err))
		}
	}
	return nil
}

// kernelMessage returns the kernel's message about a failed fsconfig call on fs. If no message
// exists, it returns the text of err.
func kernelMessage(fs int, err error) string {
	var b [256]byte // one message, such as "e ext4: Unknown parameter 'x'"
	n, none := unix.Read(fs, b[:])
	if none != nil || n < 3 {
		return err.Error()
	}
	return strings.TrimSpace(string(b[2:n]))
}
