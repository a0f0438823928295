package disk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/csi/privatemounts"
)

func TestMain(m *testing.M) { privatemounts.Main(m) }

func requireNoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// device is a block device with its content in a file.
type device struct {
	t          *testing.T
	path, file string
}

func newDevice(t *testing.T, size int64, flags uint32) *device {
	privatemounts.SkipUnlessPrivate(t)
	d := &device{t: t, file: filepath.Join(t.TempDir(), "disk")}
	f, err := os.Create(d.file)
	requireNoError(t, err)
	requireNoError(t, f.Truncate(size))
	requireNoError(t, f.Close())
	d.attachLoop(flags)
	return d
}

// attachLoop attaches a loop device to the file.
func (d *device) attachLoop(flags uint32) {
	d.t.Helper()
	f, err := os.OpenFile(d.file, os.O_RDWR, 0)
	requireNoError(d.t, err)
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	requireNoError(d.t, err)
	defer control.Close()
	for range 64 {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		requireNoError(d.t, err)
		l, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		requireNoError(d.t, err)
		err = unix.IoctlLoopConfigure(int(l.Fd()),
			&unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | flags}})
		if errors.Is(err, unix.EBUSY) {
			l.Close()
			continue
		}
		requireNoError(d.t, err)
		d.path = l.Name()
		d.t.Cleanup(func() { l.Close() }) // detaches it
		return
	}
	d.t.Fatal("no free loop device")
}

func (d *device) readContent() []byte {
	d.t.Helper()
	unix.Sync()
	b, err := os.ReadFile(d.file)
	requireNoError(d.t, err)
	return b
}

func (d *device) mustRun(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %q: %v %s", name, args, err, out)
	}
}

// withMount mounts the device, calls f, and unmounts it.
func (d *device) withMount(m Mount, f func(dir string)) error {
	d.t.Helper()
	m.Device, m.Dir = d.path, d.t.TempDir()
	if err := m.Do(context.Background()); err != nil {
		return err
	}
	f(m.Dir)
	requireNoError(d.t, unix.Unmount(m.Dir, 0))
	return nil
}

func typeOf(t *testing.T, dir string) string {
	t.Helper()
	var st unix.Statfs_t
	requireNoError(t, unix.Statfs(dir, &st))
	return map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs"}[st.Type]
}

// A blank device gets a file system of the requested type, or ext4, once. Written data persists.
// F110
func TestBlankDevices(t *testing.T) {
	for kind, made := range map[string]string{"": "ext4", "ext4": "ext4", "xfs": "xfs"} {
		t.Run("fsType "+kind, func(t *testing.T) {
			if _, err := exec.LookPath("mkfs." + made); err != nil {
				t.Skip(err)
			}
			d := newDevice(t, 320<<20, 0)
			requireNoError(t, d.withMount(Mount{Type: kind}, func(dir string) {
				if got := typeOf(t, dir); got != made {
					t.Errorf("it has %q", got)
				}
				requireNoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("kept"), 0o600))
				second := t.TempDir() // of a second pod, while the first has it mounted
				requireNoError(t, Mount{Device: d.path, Dir: second, Type: kind}.Do(t.Context()))
				if b, err := os.ReadFile(filepath.Join(second, "file")); string(b) != "kept" {
					t.Errorf("the second mount has %q, %v", b, err)
				}
				requireNoError(t, unix.Unmount(second, 0))
			}))
			for _, again := range []string{kind, ""} {
				requireNoError(t, d.withMount(Mount{Type: again, Flags: []string{"noatime"}}, func(dir string) {
					if b, err := os.ReadFile(filepath.Join(dir, "file")); string(b) != "kept" {
						t.Errorf("mounted again it has %q, %v", b, err)
					}
				}))
			}
		})
	}
}

// writeAt returns a function that writes bytes to a device.
func writeAt(offset int64, b string) func(*device) {
	return func(d *device) {
		f, err := os.OpenFile(d.path, os.O_RDWR, 0)
		requireNoError(d.t, err)
		defer f.Close()
		_, err = f.WriteAt([]byte(b), offset)
		requireNoError(d.t, err)
		requireNoError(d.t, f.Sync())
	}
}

func (d *device) makeExt4(args ...string) {
	d.mustRun("mkfs.ext4", append([]string{"-q", "-F"}, append(args, d.path)...)...)
}

// A device with content is never formatted, whatever is requested: no byte changes. F110
func TestWhatIsOnDevicesStays(t *testing.T) {
	partitions := strings.Repeat("\x00", 446) + "\x00\x00\x02\x00\x83\x00\x00\x00\x01\x00\x00\x00\xff\x00\x00\x00" +
		strings.Repeat("\x00", 48) + "\x55\xaa"
	for _, c := range []struct {
		about string
		put   func(*device)
		Mount
		want string
	}{
		{"a partition table", writeAt(0, partitions), Mount{},
			"has a partition table (dos) and is not changed: use one of its partitions"},
		{"a partition table, with a type", writeAt(0, partitions), Mount{Type: "ext4"}, "has a partition table (dos)"},
		{"an encrypted volume", writeAt(0, "LUKS\xba\xbe\x00\x01"), Mount{Type: "ext4"},
			"contains crypto_LUKS and is not changed, but fsType is ext4"},
		{"an encrypted volume, without a type", writeAt(0, "LUKS\xba\xbe\x00\x01"), Mount{},
			"does not support file system crypto_LUKS"},
		{"swap", func(d *device) { d.mustRun("mkswap", d.path) }, Mount{Type: "ext4"}, "contains swap"},
		{"another file system", func(d *device) {
			d.makeExt4()
		}, Mount{Type: "xfs"}, "contains ext4 and is not changed, but fsType is xfs: use ext4"},
		{"two at once", func(d *device) {
			d.makeExt4()
			writeAt(0, "XFSB\x00\x00\x10\x00")(d)
			writeAt(65600, "_BHRfS_M")(d)
			writeAt(4086, "SWAPSPACE2")(d)
		}, Mount{}, "is not changed"},
		{"blank, and read-only", func(*device) {}, Mount{Flags: []string{"ro"}},
			"is blank and cannot be mounted read-only"},
		{"no name of a type", func(*device) {}, Mount{Type: "../sh"}, `fsType "../sh" is not a valid file system type`},
		{"a type without programs", func(*device) {}, Mount{Type: "nofs"},
			"mkfs.nofs is not installed on the node: install nofsprogs"},
		{"options that it has not", func(d *device) {
			d.makeExt4()
		}, Mount{Flags: []string{"noatime,nosuchoption"}},
			`file system ext4 does not support one of the options ["noatime,nosuchoption"]`},
		{"in need of a repair", func(d *device) {
			d.makeExt4()
			d.mustRun("debugfs", "-w", "-R", "clri <2>", d.path)
		}, Mount{}, "needs a repair that may lose data and must be run manually: e2fsck -f "},
	} {
		t.Run(c.about, func(t *testing.T) {
			d := newDevice(t, 32<<20, 0)
			c.put(d)
			before := d.readContent()
			err := d.withMount(c.Mount, func(string) {})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if after := d.readContent(); !bytes.Equal(before, after) && !errors.Is(err, ErrNeedsRepair) &&
				c.Flags == nil {
				// except by the check of its own file system
				t.Error("the device was written to")
			}
		})
	}
}

// A file system that was not unmounted cleanly is repaired and mounted, if that loses no data. F110
func TestMending(t *testing.T) {
	d := newDevice(t, 32<<20, 0)
	d.makeExt4()
	d.mustRun("debugfs", "-w", "-R", "ssv state 2", d.path)        // it had errors
	errs := func() bool { return d.readContent()[1024+58]&2 != 0 } // the kernel remembers them
	if !errs() {
		t.Fatal("the superblock does not say so")
	}
	requireNoError(t, d.withMount(Mount{}, func(string) {}))
	if errs() {
		t.Error("it was not mended")
	}
}

// A write-protected device is mounted only with option ro. F110
func TestWriteProtectedDevices(t *testing.T) {
	d := newDevice(t, 32<<20, 0)
	d.makeExt4()
	d.attachLoop(unix.LO_FLAGS_READ_ONLY)
	if err := d.withMount(Mount{}, func(string) {}); err == nil ||
		!strings.Contains(err.Error(), "write-protected: mount it with the option ro") {
		t.Errorf("%v", err)
	}
	requireNoError(t, d.withMount(Mount{Flags: []string{"ro"}}, func(dir string) {
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing: %v", err)
		}
	}))
}

// An unreadable device is not treated as blank. F110
func TestUnreadableDevicesAreNotBlank(t *testing.T) {
	if _, err := Probe(t.Context(), filepath.Join(t.TempDir(), "absent")); err == nil ||
		!strings.Contains(err.Error(), "cannot be read") {
		t.Errorf("%v", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	requireNoError(t, os.WriteFile(empty, nil, 0o600))
	if _, err := Probe(t.Context(), empty); err == nil || !strings.Contains(err.Error(), "its size is 0") {
		t.Errorf("%v", err)
	}
}
