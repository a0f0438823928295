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

// fitsImage says which mount options a volume cannot be mounted with, before there is one: its pods would wait for ever.
func fitsImage(caps []*csi.VolumeCapability) error {
	for _, c := range caps {
		_, rest := mountoption.SplitFlags(c.GetMount().GetMountFlags())
		if err := known("ext4", rest); err != nil {
			return status.Errorf(codes.InvalidArgument, "%v: correct the mountOptions of the claim's StorageClass", err)
		}
	}
	return nil
}

// known asks the kernel whether a type of file system has options, without mounting anything. One that cannot be asked (it is
// older than 5.2, or the driver lacks CAP_SYS_ADMIN) says so when it mounts; and only then does any kernel say which options
// do not go together with what is in a file system.
func known(kind string, options []string) error {
	if len(options) == 0 {
		return nil
	}
	fs, err := unix.Fsopen(kind, unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil
	}
	defer unix.Close(fs)
	// What is to be mounted is no option: with this it is there already.
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
			return fmt.Errorf("mount option %q is none that %s can be mounted with (%s)", o, kind, said(fs, err))
		}
	}
	return nil
}

// said is what the kernel says about an error of a file system that is being configured; where it says nothing, the error.
func said(fs int, err error) string {
	var b [256]byte // a message each time, "e ext4: Unknown parameter 'x'"
	n, none := unix.Read(fs, b[:])
	if none != nil || n < 3 {
		return err.Error()
	}
	return strings.TrimSpace(string(b[2:n]))
}
