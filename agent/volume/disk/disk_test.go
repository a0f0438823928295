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

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// device is a block device of a size, with what is in a file.
type device struct {
	t          *testing.T
	path, file string
}

func newDevice(t *testing.T, size int64, flags uint32) *device {
	privatemounts.SkipUnlessPrivate(t)
	d := &device{t: t, file: filepath.Join(t.TempDir(), "disk")}
	f, err := os.Create(d.file)
	must(t, err)
	must(t, f.Truncate(size))
	must(t, f.Close())
	d.show(flags)
	return d
}

// show has a loop device show the file.
func (d *device) show(flags uint32) {
	d.t.Helper()
	f, err := os.OpenFile(d.file, os.O_RDWR, 0)
	must(d.t, err)
	defer f.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(d.t, err)
	defer control.Close()
	for range 64 {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		must(d.t, err)
		l, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		must(d.t, err)
		err = unix.IoctlLoopConfigure(int(l.Fd()), &unix.LoopConfig{Fd: uint32(f.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR | flags}})
		if errors.Is(err, unix.EBUSY) {
			l.Close()
			continue
		}
		must(d.t, err)
		d.path = l.Name()
		d.t.Cleanup(func() { l.Close() }) // which frees it
		return
	}
	d.t.Fatal("no free loop device")
}

func (d *device) has() []byte {
	d.t.Helper()
	unix.Sync()
	b, err := os.ReadFile(d.file)
	must(d.t, err)
	return b
}

func (d *device) command(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %q: %v %s", name, args, err, out)
	}
}

// mounts mounts it, has f look, and unmounts it.
func (d *device) mounts(m Mount, f func(dir string)) error {
	d.t.Helper()
	m.Device, m.Dir = d.path, d.t.TempDir()
	if err := m.Do(context.Background()); err != nil {
		return err
	}
	f(m.Dir)
	must(d.t, unix.Unmount(m.Dir, 0))
	return nil
}

func typeOf(t *testing.T, dir string) string {
	t.Helper()
	var st unix.Statfs_t
	must(t, unix.Statfs(dir, &st))
	return map[int64]string{unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs"}[st.Type]
}

// A blank device gets a file system of the type that is asked for, or ext4, once: what is written is there the next time.
// F110
func TestBlankDevices(t *testing.T) {
	for kind, made := range map[string]string{"": "ext4", "ext4": "ext4", "xfs": "xfs"} {
		t.Run("fsType "+kind, func(t *testing.T) {
			if _, err := exec.LookPath("mkfs." + made); err != nil {
				t.Skip(err)
			}
			d := newDevice(t, 320<<20, 0)
			must(t, d.mounts(Mount{Type: kind}, func(dir string) {
				if got := typeOf(t, dir); got != made {
					t.Errorf("it has %q", got)
				}
				must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("kept"), 0o600))
				second := t.TempDir() // of another pod, while the first has it
				must(t, Mount{Device: d.path, Dir: second, Type: kind}.Do(t.Context()))
				if b, err := os.ReadFile(filepath.Join(second, "file")); string(b) != "kept" {
					t.Errorf("the second mount has %q, %v", b, err)
				}
				must(t, unix.Unmount(second, 0))
			}))
			for _, again := range []string{kind, ""} {
				must(t, d.mounts(Mount{Type: again, Flags: []string{"noatime"}}, func(dir string) {
					if b, err := os.ReadFile(filepath.Join(dir, "file")); string(b) != "kept" {
						t.Errorf("mounted again it has %q, %v", b, err)
					}
				}))
			}
		})
	}
}

// at writes bytes into a device.
func at(offset int64, b string) func(*device) {
	return func(d *device) {
		f, err := os.OpenFile(d.path, os.O_RDWR, 0)
		must(d.t, err)
		defer f.Close()
		_, err = f.WriteAt([]byte(b), offset)
		must(d.t, err)
		must(d.t, f.Sync())
	}
}

func (d *device) mkfs(args ...string) {
	d.command("mkfs.ext4", append([]string{"-q", "-F"}, append(args, d.path)...)...)
}

// What has anything on it is never made a file system of, whatever is asked for: not a byte of it changes. F110
func TestWhatIsOnDevicesStays(t *testing.T) {
	partitions := strings.Repeat("\x00", 446) + "\x00\x00\x02\x00\x83\x00\x00\x00\x01\x00\x00\x00\xff\x00\x00\x00" + strings.Repeat("\x00", 48) + "\x55\xaa"
	for _, c := range []struct {
		about string
		put   func(*device)
		Mount
		want string
	}{
		{"a partition table", at(0, partitions), Mount{}, "has a partition table (dos), and is left as it is: name one of its partitions"},
		{"a partition table, with a type", at(0, partitions), Mount{Type: "ext4"}, "has a partition table (dos)"},
		{"an encrypted volume", at(0, "LUKS\xba\xbe\x00\x01"), Mount{Type: "ext4"}, "has crypto_LUKS on it, and is left as it is: fsType says ext4"},
		{"an encrypted volume, without a type", at(0, "LUKS\xba\xbe\x00\x01"), Mount{}, "no file system crypto_LUKS"},
		{"swap", func(d *device) { d.command("mkswap", d.path) }, Mount{Type: "ext4"}, "has swap on it"},
		{"another file system", func(d *device) { d.mkfs() }, Mount{Type: "xfs"}, "has ext4 on it, and is left as it is: fsType says xfs; name ext4"},
		{"two at once", func(d *device) {
			d.mkfs()
			at(0, "XFSB\x00\x00\x10\x00")(d)
			at(65600, "_BHRfS_M")(d)
			at(4086, "SWAPSPACE2")(d)
		}, Mount{}, "is left as it is"},
		{"blank, and read-only", func(*device) {}, Mount{Flags: []string{"ro"}}, "is blank, and is to be mounted read-only"},
		{"no name of a type", func(*device) {}, Mount{Type: "../sh"}, `fsType "../sh" is no name of a file system`},
		{"a type without programs", func(*device) {}, Mount{Type: "nofs"}, "mkfs.nofs is not installed on the node: install nofsprogs"},
		{"options that it has not", func(d *device) { d.mkfs() }, Mount{Flags: []string{"noatime,nosuchoption"}}, `one of the options ["noatime,nosuchoption"] is none of ext4`},
		{"in need of a repair", func(d *device) { d.mkfs(); d.command("debugfs", "-w", "-R", "clri <2>", d.path) }, Mount{}, "needs a repair that may lose data, which is yours to run: e2fsck -f "},
	} {
		t.Run(c.about, func(t *testing.T) {
			d := newDevice(t, 32<<20, 0)
			c.put(d)
			before := d.has()
			err := d.mounts(c.Mount, func(string) {})
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if after := d.has(); !bytes.Equal(before, after) && !errors.Is(err, ErrNeedsRepair) && c.Flags == nil { // but by the check of its own
				t.Error("the device was written to")
			}
		})
	}
}

// A file system that was not left cleanly is mended where that loses nothing, and mounted. F110
func TestMending(t *testing.T) {
	d := newDevice(t, 32<<20, 0)
	d.mkfs()
	d.command("debugfs", "-w", "-R", "ssv state 2", d.path) // it had errors
	errs := func() bool { return d.has()[1024+58]&2 != 0 }  // which the kernel does not forget
	if !errs() {
		t.Fatal("the superblock does not say so")
	}
	must(t, d.mounts(Mount{}, func(string) {}))
	if errs() {
		t.Error("it was not mended")
	}
}

// A write-protected device is mounted with the option ro alone. F110
func TestWriteProtectedDevices(t *testing.T) {
	d := newDevice(t, 32<<20, 0)
	d.mkfs()
	d.show(unix.LO_FLAGS_READ_ONLY)
	if err := d.mounts(Mount{}, func(string) {}); err == nil || !strings.Contains(err.Error(), "write-protected: mount it with the option ro") {
		t.Errorf("%v", err)
	}
	must(t, d.mounts(Mount{Flags: []string{"ro"}}, func(dir string) {
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
			t.Errorf("writing: %v", err)
		}
	}))
}

// What cannot be read is not taken for blank. F110
func TestUnreadableDevicesAreNotBlank(t *testing.T) {
	if _, err := Probe(t.Context(), filepath.Join(t.TempDir(), "absent")); err == nil || !strings.Contains(err.Error(), "cannot be read") {
		t.Errorf("%v", err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	must(t, os.WriteFile(empty, nil, 0o600))
	if _, err := Probe(t.Context(), empty); err == nil || !strings.Contains(err.Error(), "it has no size") {
		t.Errorf("%v", err)
	}
}
