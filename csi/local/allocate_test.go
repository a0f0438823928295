package local

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

// A file system that keeps its files in memory gives up at every signal, before Linux 6.10.
func TestAllocatedThroughSignals(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=256m"); err != nil {
		t.Skipf("needs: the right to mount: %v", err)
	}
	defer func() { must(t, unix.Unmount(dir, 0)) }()
	const size = 2*piece + 5*mib
	interrupted := func(take func(f *os.File) error) (err error) {
		f, err := os.Create(filepath.Join(dir, "f"))
		must(t, err)
		defer f.Close()
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		thread, ended, stopped := unix.Gettid(), make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			for range 50_000 {
				must(t, unix.Tgkill(os.Getpid(), thread, unix.SIGURG)) // as the runtime does to have a thread give way
				select {
				case <-ended:
					return
				default:
				}
			}
		}()
		err = take(f)
		close(ended)
		<-stopped
		if err != nil {
			return err
		}
		var st unix.Stat_t
		must(t, unix.Fstat(int(f.Fd()), &st))
		if st.Size != size || st.Blocks*512 < size {
			t.Errorf("the file has %d bytes and blocks of %d, want %d", st.Size, st.Blocks*512, size)
		}
		return nil
	}
	seen := false
	for range 5 {
		seen = seen || interrupted(func(f *os.File) error { return unix.Fallocate(int(f.Fd()), 0, 0, size) }) == unix.EINTR
	}
	if !seen {
		t.Skip("needs: a kernel that is interrupted by signals as it gives a file its blocks")
	}
	for range 5 {
		if err := interrupted(func(f *os.File) error { return allocate(f, size) }); err != nil {
			t.Fatalf("%d bytes with signals meanwhile: %v", int64(size), err)
		}
	}
}
