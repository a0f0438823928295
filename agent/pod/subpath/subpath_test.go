package subpath

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/virtual"
)

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: mounts are real")
	}
}

func bindSubPath(t *testing.T, volume, sub string) (string, error) {
	t.Helper()
	target := filepath.Join(t.TempDir(), "subpaths", "app", "0")
	t.Cleanup(func() {
		if err := (&BindMounter{}).Release(filepath.Dir(filepath.Dir(target))); err != nil {
			t.Error(err)
		}
	})
	return (&BindMounter{}).Bind(t.Context(), target, volume, sub)
}

// Directories created for a subPath get the mode and owner of the volume, at every level; existing
// ones do not change.
func TestSubPathTakesTheVolumesOwner(t *testing.T) {
	needRoot(t)
	volume := t.TempDir()
	for _, err := range []error{os.Chown(volume, 1000, 2000), os.Chmod(volume, 0o775|os.ModeSetgid),
		os.Mkdir(volume+"/there", 0o711)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	at, err := bindSubPath(t, volume, "there/new/deep")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{volume + "/there/new", volume + "/there/new/deep", at} {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		owner := st.Sys().(*syscall.Stat_t)
		if st.Mode() != os.ModeDir|os.ModeSetgid|0o775 || owner.Uid != 1000 || owner.Gid != 2000 {
			t.Errorf("%s: %s, %d:%d", path, st.Mode(), owner.Uid, owner.Gid)
		}
	}
	if st, err := os.Stat(volume + "/there"); err != nil || st.Mode().Perm() != 0o711 {
		t.Errorf("what was there is now %v, %v", st, err)
	}
}

// Nothing that a pod creates in its volume leads outside of it, blocks the agent, or is opened.
func TestSubPathIsNotTrusted(t *testing.T) {
	needRoot(t)
	volume := t.TempDir()
	for _, err := range []error{os.Symlink("/etc", volume+"/absolute"), os.Symlink("../..", volume+"/up"),
		os.Mkdir(volume+"/dir", 0o755),
		os.Symlink("dir", volume+"/inside"), unix.Mkfifo(volume+"/fifo", 0o600),
		os.WriteFile(volume+"/file", []byte("x"), 0o600),
		os.Symlink("nothing", volume+"/dangling")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for sub, ok := range map[string]bool{"absolute": false, "up": false, "absolute/passwd": false, "up/new": false,
		"../x": false, "file/x": false,
		"dangling": false, "inside": true, "inside/new": true, "fifo": true, "file": true} {
		at, err := bindSubPath(t, volume, sub)
		if ok != (err == nil) {
			t.Errorf("subPath %s: %v", sub, err)
		}
		if err != nil {
			continue
		}
		want, err1 := os.Stat(filepath.Join(volume, sub))
		got, err2 := os.Stat(at)
		if err := errors.Join(err1, err2); err != nil || !os.SameFile(want, got) {
			t.Errorf("subPath %s is not what the volume has there: %v", sub, err)
		}
	}
}

// A volume on an unresponsive server delays no other volume. A first request fails after a while,
// further requests fail at once, and requests succeed when the server is back. The number of
// blocked threads is bounded.
func TestSubPathOfAServerThatHangs(t *testing.T) {
	volume := t.TempDir()
	virtual.Test(t, func(t *testing.T) {
		back := make(chan struct{})
		var asked atomic.Int32
		b := &BindMounter{open: func(volume, sub string) (openedSubPath, error) {
			if asked.Add(1); strings.HasPrefix(volume, "hangs") {
				<-back
			}
			return openOrCreateSubPath(t.TempDir(), sub)
		}}
		ask := func(ctx context.Context, volume string) (string, time.Duration) {
			began := time.Now()
			f, err := b.openWithTimeout(ctx, volume, "sub")
			if err == nil {
				f.file.Close()
				return "", time.Since(began)
			}
			return err.Error(), time.Since(began)
		}
		const hangs = `subPath "sub": the file system of the volume has not responded for 10s: check its server`
		if said, took := ask(t.Context(), "hangs"); said != hangs || took != subPathWait {
			t.Errorf("%q after %s", said, took)
		}
		time.Sleep(20 * time.Second) // in virtual time
		if said, took := ask(t.Context(), "hangs"); said != strings.Replace(hangs, "10s", "30s", 1) || took != 0 ||
			asked.Load() != 1 {
			t.Errorf("asked again: %q after %s, the file system was asked %d times", said, took, asked.Load())
		}
		if said, took := ask(t.Context(), volume); said != "" || took != 0 {
			t.Errorf("another volume: %q after %s", said, took)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if said, took := ask(ended, "hangs too"); said != `subPath "sub": context canceled` || took != 0 {
			t.Errorf("of a pod that goes: %q after %s", said, took)
		}
		for n := 2; n < maxHungOpens; n++ {
			go ask(t.Context(), "hangs"+strings.Repeat(".", n))
		}
		time.Sleep(subPathWait) // in virtual time
		virtual.Wait()
		if said, _ := ask(t.Context(), volume); !strings.Contains(said,
			"64 file systems of volumes on this node do not respond") {
			t.Errorf("with %d that hang: %q", maxHungOpens, said)
		}
		close(back)
		virtual.Wait()
		for _, v := range []string{"hangs", volume} {
			if said, took := ask(t.Context(), v); said != "" || took != 0 {
				t.Errorf("the server is back, %s: %q after %s", v, said, took)
			}
		}
		if len(b.pendingOpens) != 0 || b.hungOpens != 0 {
			t.Errorf("left: %v, %d", b.pendingOpens, b.hungOpens)
		}
	})
}
