package pod

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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
		if err := (BindSubPaths{}).Release(filepath.Dir(filepath.Dir(target))); err != nil {
			t.Error(err)
		}
	})
	return BindSubPaths{}.Bind(target, volume, sub)
}

// A folder that a subPath makes is its volume's: same mode, same owner, as deep as it goes; what is there stays.
func TestSubPathTakesTheVolumesOwner(t *testing.T) {
	needRoot(t)
	volume := t.TempDir()
	for _, err := range []error{os.Chown(volume, 1000, 2000), os.Chmod(volume, 0o775|os.ModeSetgid), os.Mkdir(volume+"/there", 0o711)} {
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

// Nothing that a pod puts into its volume leads out of it, is waited for, or is opened.
func TestSubPathIsNotTrusted(t *testing.T) {
	needRoot(t)
	volume := t.TempDir()
	for _, err := range []error{os.Symlink("/etc", volume+"/absolute"), os.Symlink("../..", volume+"/up"), os.Mkdir(volume+"/dir", 0o755),
		os.Symlink("dir", volume+"/inside"), unix.Mkfifo(volume+"/fifo", 0o600), os.WriteFile(volume+"/file", []byte("x"), 0o600),
		os.Symlink("nothing", volume+"/dangling")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for sub, ok := range map[string]bool{"absolute": false, "up": false, "absolute/passwd": false, "up/new": false, "../x": false, "file/x": false,
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
