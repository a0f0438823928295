package lossy

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// After the cut nothing works and nothing is synced any more.
func TestCut(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "write f abc; sync f; sync .; patch f 0 X")
	f, err := os.OpenFile(filepath.Join(d.Path(), "f"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	d.Cut()
	<-d.PowerLost()
	if err := f.Sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("sync in the dark: %v, want EIO", err)
	}
	if _, err := f.WriteAt([]byte("Y"), 1); !errors.Is(err, syscall.EIO) {
		t.Errorf("write in the dark: %v, want EIO", err)
	}
	if err := os.Mkdir(filepath.Join(d.Path(), "d"), 0o700); !errors.Is(err, syscall.EIO) {
		t.Errorf("mkdir in the dark: %v, want EIO", err)
	}
	f.Close()
	if err := d.Crash(Loss{}); err != nil {
		t.Fatal(err)
	}
	if got := listTree(t, d.Path()); got != "f=abc" {
		t.Errorf("left %q", got)
	}
}

// A planned cut comes at the change that it was planned for, each in turn.
func TestCutAt(t *testing.T) {
	want := []string{1: "", 2: "f=", 3: "f=", 4: "f=abc"}
	for n := uint64(1); n <= 4; n++ {
		d := newDisk(t)
		d.CutAt(n)
		// The changes: create, write, sync f, sync folder.
		f, err := os.Create(filepath.Join(d.Path(), "f"))
		if err == nil {
			_, err = f.Write([]byte("abc"))
			err = errors.Join(err, f.Sync(), f.Close())
			err = errors.Join(err, withFile(d.Path(), (*os.File).Sync))
		}
		if !errors.Is(err, syscall.EIO) {
			t.Fatalf("cut at change %d: %v, want EIO", n, err)
		}
		select {
		case <-d.PowerLost():
		default:
			t.Fatalf("cut at change %d: there is still power", n)
		}
		if err := d.Crash(Loss{Entries: Kept}); err != nil {
			t.Fatal(err)
		}
		if got := listTree(t, d.Path()); got != want[n] {
			t.Errorf("cut at change %d: left %q, want %q", n, got, want[n])
		}
		if n == 1 {
			runScript(t, d.Path(), "write g abc; sync g; sync .") // the plan is over
		}
	}
}

func TestFailedSync(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "write f abc; write other abc; sync f; sync other; sync .")
	listTree(t, d.Path()) // now the kernel has all of it
	runScript(t, d.Path(), "patch f 0 X; patch other 0 X")
	d.Fail(Sync, "f*", 1)
	f, err := os.OpenFile(filepath.Join(d.Path(), "f"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Sync(); !errors.Is(err, syscall.EIO) {
		t.Errorf("sync: %v, want EIO", err)
	}
	// Linux reports the failure once. The data then counts as clean and is never written.
	if err := f.Sync(); err != nil {
		t.Errorf("second sync: %v", err)
	}
	runScript(t, d.Path(), "sync other")
	if got := listTree(t, d.Path()); got != "f=Xbc other=Xbc" {
		t.Errorf("readable is %q", got)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if got := listTree(t, d.Path()); got != "f=abc other=Xbc" {
		t.Errorf("when the kernel has dropped it, readable is %q", got)
	}
	if err := d.Crash(Loss{Data: Kept}); err != nil {
		t.Fatal(err)
	}
	if got := listTree(t, d.Path()); got != "f=abc other=Xbc" {
		t.Errorf("left %q", got)
	}
}

func TestFailedReadAndWrite(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "write f abc; write g abc; sync f; sync g; sync .")
	if err := d.Crash(Loss{}); err != nil {
		t.Fatal(err)
	}
	d.Fail(Read, "f", -1)
	if _, err := os.ReadFile(filepath.Join(d.Path(), "f")); !errors.Is(err, syscall.EIO) {
		t.Errorf("read: %v, want EIO", err)
	}
	if b, err := os.ReadFile(filepath.Join(d.Path(), "g")); string(b) != "abc" || err != nil {
		t.Errorf("read of the other file: %q, %v", b, err)
	}
	d.Heal()
	if b, err := os.ReadFile(filepath.Join(d.Path(), "f")); string(b) != "abc" || err != nil {
		t.Errorf("read after healing: %q, %v", b, err)
	}
	d.Fail(Write, "g", 1)
	write := func() error {
		return withFile(filepath.Join(d.Path(), "g"), func(f *os.File) error {
			_, err := f.WriteAt([]byte("Z"), 0)
			return err
		})
	}
	if err := write(); !errors.Is(err, syscall.EIO) {
		t.Errorf("write: %v, want EIO", err)
	}
	if err := write(); err != nil {
		t.Errorf("second write: %v", err)
	}
}

func TestFull(t *testing.T) {
	d := newDisk(t)
	d.Limit(10 * blockBytes)
	name := filepath.Join(d.Path(), "f")
	f, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	n, err := f.Write(make([]byte, 20*blockBytes))
	if !errors.Is(err, syscall.ENOSPC) || n != 10*blockBytes {
		t.Errorf("wrote %d bytes, error %v; want %d and ENOSPC", n, err, 10*blockBytes)
	}
	if _, err := f.WriteAt([]byte("x"), 5); err != nil {
		t.Errorf("overwriting: %v", err)
	}
	if err := f.Truncate(1 << 20); err != nil {
		t.Errorf("a hole: %v", err)
	}
	if _, err := f.WriteAt([]byte("x"), 1<<19); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("writing into the hole: %v, want ENOSPC", err)
	}
	if err := unix.Fallocate(int(f.Fd()), 0, 0, 1<<20); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("fallocate: %v, want ENOSPC", err)
	}
	var s unix.Statfs_t
	if err := unix.Statfs(d.Path()+"/", &s); err != nil || s.Bfree != 0 || s.Blocks != 10 {
		t.Errorf("statfs: %d of %d blocks free, error %v", s.Bfree, s.Blocks, err)
	}
	if err := f.Truncate(blockBytes); err != nil {
		t.Fatal(err)
	}
	if got := d.Used(); got != blockBytes {
		t.Errorf("%d bytes are taken, want one block", got)
	}
	runScript(t, d.Path(), "write g abc; remove f")
	if got := d.Used(); got != blockBytes {
		t.Errorf("%d bytes are taken after removing, want one block", got)
	}
	d.Limit(0)
	if err := os.WriteFile(name, make([]byte, 20*blockBytes), 0o600); err != nil {
		t.Errorf("writing without a bound: %v", err)
	}
}

// A slow sync takes its time, but not beyond a power cut.
func TestSlowSync(t *testing.T) {
	d := newDisk(t)
	runScript(t, d.Path(), "write f abc")
	d.SlowSync(time.Hour)
	asked := make(chan string, 1)
	d.Trace(func(change string) { asked <- change })
	done := make(chan error, 1)
	f, err := os.OpenFile(filepath.Join(d.Path(), "f"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	go func() { done <- f.Sync() }()
	if got := <-asked; got != "sync f" {
		t.Errorf("asked for %q", got)
	}
	d.Cut()
	if err := <-done; !errors.Is(err, syscall.EIO) {
		t.Errorf("sync in the dark: %v, want EIO", err)
	}
	f.Close()
}

// A standstill shows how far a process had come, and only Resume ends it.
func TestStall(t *testing.T) {
	d := newDisk(t)
	stalled := d.StallAt(3) // create, write
	done := make(chan error, 1)
	go func() {
		f, err := os.Create(filepath.Join(d.Path(), "f"))
		if err == nil {
			_, err = f.Write([]byte("abc"))
			err = errors.Join(err, f.Sync(), f.Close())
		}
		done <- err
	}()
	<-stalled
	if got := listTree(t, d.Path()); got != "f=abc" {
		t.Errorf("so far there is %q", got)
	}
	select {
	case err := <-done:
		t.Errorf("the sync has come back: %v", err)
	default:
	}
	d.Resume()
	if err := <-done; !errors.Is(err, syscall.EIO) {
		t.Errorf("the sync: %v, want EIO", err)
	}
	d.Resume()
	if got, want := d.Unsynced(), []string{"/", "/f"}; !slices.Equal(got, want) {
		t.Errorf("not synced: %v, want %v", got, want)
	}
	runScript(t, d.Path(), "sync f; sync .")
}

func TestTrace(t *testing.T) {
	d := newDisk(t)
	var got []string
	d.Trace(func(s string) { got = append(got, s) })
	before := d.Changes()
	runScript(t, d.Path(), "mkdir d; write d/f abc; sync d/f; rename d/f d/g; sync d; remove d/g")
	d.Trace(nil)
	want := []string{"create d", "create f", "write f", "sync f", "rename f", "sync d", "remove g"}
	if !slices.Equal(got, want) {
		t.Errorf("changes: %v, want %v", got, want)
	}
	if n := d.Changes() - before; n != uint64(len(want)) {
		t.Errorf("%d changes counted, want %d", n, len(want))
	}
}
