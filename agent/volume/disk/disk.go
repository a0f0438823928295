// Package disk mounts file systems that are on block devices of the node, as they came or made anew where a device is
// blank. A device that has anything on it is never written to but by the repair of its own file system, as far as that
// loses nothing.
//
// What is on a device is told by blkid (util-linux), file systems are made and mended by the programs that come with each
// (mkfs.TYPE, fsck.TYPE).
package disk

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/mountoption"
)

const (
	// DefaultType is what a blank device gets where no type is named.
	DefaultType = "ext4"
	// toolPatience bounds how long a file system is made or mended, which on large devices takes a while.
	toolPatience = 15 * time.Minute
	// probePatience bounds the look at a device.
	probePatience = 30 * time.Second
	// mostSaid bounds what of a program's words is passed on.
	mostSaid = 1000
)

// Mount is what is wanted of a block device.
type Mount struct {
	Device string
	Dir    string   // a folder that is there
	Type   string   // of the file system, "" for whichever is there, or DefaultType
	Flags  []string // options of the mount
}

// Content is what a device has on it. The zero Content is that of a blank one.
type Content struct {
	Type  string // of a file system, or of a volume of other programs: "crypto_LUKS", "LVM2_member"
	Table string // of partitions: "gpt", "dos"
}

// types are names of file systems, which are parts of names of programs.
var types = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]{0,31}$`)

// Do mounts the device. A blank one gets a file system first; one that was not left cleanly is mended as far as that loses
// nothing. Who calls does so for one Mount of a device at a time.
func (m Mount) Do(ctx context.Context) error {
	if m.Type != "" && !types.MatchString(m.Type) {
		return fmt.Errorf("fsType %q is no name of a file system", m.Type)
	}
	free, protected, err := state(m.Device)
	if err != nil {
		return err
	}
	has, err := Probe(ctx, m.Device)
	if err != nil {
		return err
	}
	bits, rest := mountoption.SplitFlags(m.Flags)
	kind, err := m.kind(has)
	if err != nil {
		return err
	}
	readOnly := bits&unix.MS_RDONLY != 0
	switch {
	case protected && !readOnly:
		return fmt.Errorf("block device %s is write-protected: mount it with the option ro", m.Device)
	case has == Content{} && !free:
		return fmt.Errorf("block device %s is in use by another program, and has no file system", m.Device)
	case has == Content{} && readOnly:
		return fmt.Errorf("block device %s is blank, and is to be mounted read-only: make its file system first, or mount it for writing once", m.Device)
	case has == Content{}:
		err = format(ctx, m.Device, kind)
	case free && !readOnly:
		err = mend(ctx, m.Device, kind)
	}
	if err != nil {
		return err
	}
	return explained(unix.Mount(m.Device, m.Dir, kind, bits, strings.Join(rest, ",")), m, kind)
}

// kind is the type to mount, by what was asked for and what is there.
func (m Mount) kind(has Content) (string, error) {
	switch {
	case has == Content{} && m.Type == "":
		return DefaultType, nil
	case has == Content{}:
		return m.Type, nil
	case has.Table != "" && has.Type == "":
		return "", fmt.Errorf("block device %s has a partition table (%s), and is left as it is: name one of its partitions", m.Device, has.Table)
	case m.Type != "" && !same(m.Type, has.Type):
		return "", fmt.Errorf("block device %s has %s on it, and is left as it is: fsType says %s; name %s where that is a file system to keep, "+
			"or empty the device with 'wipefs -a %s'", m.Device, has.Type, m.Type, has.Type, m.Device)
	case m.Type != "":
		return m.Type, nil
	}
	return has.Type, nil
}

// same says whether a file system of one type is mounted as the other: those of ext are one driver's.
func same(asked, has string) bool {
	ext := func(t string) bool { return t == "ext2" || t == "ext3" || t == "ext4" }
	return asked == has || ext(asked) && ext(has)
}

// explained says what the kernel means.
func explained(err error, m Mount, kind string) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENODEV):
		err = fmt.Errorf("the node's kernel has no file system %s: %w", kind, err)
	case errors.Is(err, unix.EUCLEAN), errors.Is(err, unix.EBADMSG):
		err = fmt.Errorf("%w: %w", needsRepair(m.Device, kind), err)
	case errors.Is(err, unix.EINVAL):
		err = fmt.Errorf("one of the options %q is none of %s, or its file system is damaged (the node's kernel log says which): %w", m.Flags, kind, err)
	}
	return fmt.Errorf("mounting %s at %s as %s: %w", m.Device, m.Dir, kind, err)
}

// ErrNeedsRepair is for a file system whose repair may lose data.
var ErrNeedsRepair = errors.New("needs a repair that may lose data, which is yours to run")

func needsRepair(device, kind string) error {
	repair := "fsck." + kind + " " + device
	switch {
	case same(kind, "ext4"):
		repair = "e2fsck -f " + device
	case kind == "xfs":
		repair = "xfs_repair " + device
	}
	return fmt.Errorf("the file system on %s %w: %s", device, ErrNeedsRepair, repair)
}

// state says whether nobody has a device mounted or in use otherwise, and whether nobody can write to it.
func state(device string) (free, protected bool, err error) {
	f, err := os.OpenFile(device, os.O_RDONLY|unix.O_EXCL|unix.O_NONBLOCK, 0)
	if free = err == nil; errors.Is(err, unix.EBUSY) {
		f, err = os.OpenFile(device, os.O_RDONLY|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return false, false, fmt.Errorf("block device %s: %w", device, err)
	}
	defer f.Close()
	ro, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	if err != nil {
		return false, false, fmt.Errorf("block device %s: whether it is write-protected: %w", device, err)
	}
	return free, ro != 0, nil
}

// Probe looks at what a device has on it. It is blank only when its beginning and its end can be read and blkid knows
// nothing of what is there; two answers at once are none.
func Probe(ctx context.Context, device string) (Content, error) {
	if err := readable(device); err != nil {
		return Content{}, fmt.Errorf("block device %s cannot be read: %w", device, err)
	}
	ctx, cancel := context.WithTimeout(ctx, probePatience)
	defer cancel()
	out, err := run(ctx, "util-linux", "blkid", "-p", "-o", "export", "-s", "TYPE", "-s", "PTTYPE", device)
	switch code := exitCode(err); {
	case err == nil:
	case code == 2: // nothing is found, or nothing of that
		return Content{}, nil
	case code == 8:
		return Content{}, fmt.Errorf("block device %s has traces of several file systems, and is left as it is: see 'wipefs %s'", device, device)
	default:
		return Content{}, err
	}
	var c Content
	for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
		switch name, value, _ := strings.Cut(lines.Text(), "="); name {
		case "TYPE":
			c.Type = value
		case "PTTYPE":
			c.Table = value
		}
	}
	if c == (Content{}) {
		return c, fmt.Errorf("block device %s has something on it which nobody knows, and is left as it is: %s", device, bytes.TrimSpace(out))
	}
	return c, nil
}

// readable reads where file systems have their marks: blkid takes what it cannot read for blank.
func readable(device string) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer f.Close()
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if size == 0 {
		return errors.New("it has no size")
	}
	b := make([]byte, min(size, 1<<20))
	for _, at := range []int64{0, size - int64(len(b))} {
		if _, err := f.ReadAt(b, at); err != nil {
			return err
		}
	}
	return nil
}

// format makes a file system of a blank device.
func format(ctx context.Context, device, kind string) error {
	args := []string{device}
	if same(kind, "ext4") {
		args = []string{"-q", "-F", "-m", "0", device}
	}
	if _, err := run(ctx, packageOf(kind), "mkfs."+kind, args...); err != nil {
		return fmt.Errorf("making the file system of the blank device %s: %w", device, err)
	}
	return nil
}

// mend has a file system put in order that was not left cleanly, as far as that loses nothing. Those that mend themselves
// when they are mounted have a program that does nothing, or none.
func mend(ctx context.Context, device, kind string) error {
	args := []string{"-a", device}
	if same(kind, "ext4") {
		args = []string{"-p", device}
	}
	_, err := run(ctx, packageOf(kind), "fsck."+kind, args...)
	switch code := exitCode(err); {
	case err == nil, errors.Is(err, exec.ErrNotFound):
		return nil
	case code < 0: // it was ended, or could not be run
		return fmt.Errorf("checking the file system on %s: %w", device, err)
	case code&4 != 0:
		return fmt.Errorf("%w: %w", needsRepair(device, kind), err)
	case code&^3 != 0:
		return fmt.Errorf("checking the file system on %s: %w", device, err)
	}
	return nil // all that was found is corrected
}

// packageOf is what has the programs of a file system, on most systems.
func packageOf(kind string) string {
	switch {
	case same(kind, "ext4"):
		return "e2fsprogs"
	case kind == "btrfs":
		return "btrfs-progs"
	case kind == "vfat":
		return "dosfstools"
	}
	return kind + "progs"
}

// exitCode is that of a program which ended with an error, -1 for every other error, 0 for none.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		return exit.ExitCode()
	}
	return -1
}

// run runs a program of the node, which ends with this one.
func run(ctx context.Context, from, name string, args ...string) ([]byte, error) {
	path, err := exec.LookPath(name)
	if err != nil {
		return nil, fmt.Errorf("%s is not installed on the node: install %s: %w", name, from, exec.ErrNotFound)
	}
	ctx, cancel := context.WithTimeout(ctx, toolPatience)
	defer cancel()
	c := exec.CommandContext(ctx, path, args...)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing writes to a device of which nobody knows
	out, err := c.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", name, err, bytes.TrimSpace(out[:min(len(out), mostSaid)]))
	}
	return out, nil
}
