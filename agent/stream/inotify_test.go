package stream

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// expectChange waits for a signal; open reports whether the folder still exists.
func expectChange(t *testing.T, n *notifier) (open bool) {
	t.Helper()
	select {
	case _, open = <-n.ch:
		return open
	case <-time.After(20 * time.Second):
		t.Fatal("no change was signaled")
		return false
	}
}

// All followers of a node share one inotify instance. Each gets changes of its own folder only.
func TestFollowersShareAnInstance(t *testing.T) {
	w := &folderWatcher{}
	made := 0
	w.open = func() (int, error) {
		made++
		return unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	}
	var dirs []string
	var all []*notifier
	for range 200 {
		dir := t.TempDir()
		n, err := w.newNotifier(dir)
		if err != nil {
			t.Fatal(err)
		}
		dirs, all = append(dirs, dir), append(all, n)
	}
	again, err := w.newNotifier(dirs[7])
	if err != nil {
		t.Fatal(err)
	}
	if made != 1 {
		t.Errorf("%d instances for 201 followers", made)
	}
	if err := os.WriteFile(filepath.Join(dirs[7], "0.log"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	expectChange(t, all[7])
	expectChange(t, again)
	for i, n := range all {
		if len(n.ch) > 0 && i != 7 {
			t.Errorf("folder %d changed", i)
		}
	}
	again.closeNotifier()
	if err := os.WriteFile(filepath.Join(dirs[7], "1.log"), []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	expectChange(t, all[7])
	if err := os.RemoveAll(dirs[8]); err != nil {
		t.Fatal(err)
	}
	for expectChange(t, all[8]) {
	}
	for _, n := range all {
		n.closeNotifier()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.folders) != 0 {
		t.Errorf("%d watches are left", len(w.folders))
	}
}

// If containers have used all inotify instances, followers poll, and the next follower tries again.
func TestFollowersPollWithoutInotify(t *testing.T) {
	w := &folderWatcher{open: func() (int, error) { return -1, unix.EMFILE }}
	dir := filepath.Join(t.TempDir(), "logs")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	n, err := w.newNotifier(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !expectChange(t, n) {
		t.Error("the folder counts as gone")
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	for expectChange(t, n) {
	}
	n.closeNotifier()
	w.open = nil
	if n, err = w.newNotifier(t.TempDir()); err != nil || n.stop != nil {
		t.Fatalf("with instances again: %v", err)
	}
	n.closeNotifier()
	if _, err := w.newNotifier(dir); err == nil {
		t.Error("a folder that does not exist is watched")
	}
}
