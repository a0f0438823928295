package backups

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

// fakeStore is a fake store whose content is backed up.
type fakeStore struct {
	content string

	mu    sync.Mutex
	err   error
	hangs bool
	stuck chan struct{} // nil, or write blocks until it is closed, regardless of its context
	asked int
}

func (s *fakeStore) write(ctx context.Context, w io.Writer) error {
	s.mu.Lock()
	s.asked++
	err, hangs, stuck := s.err, s.hangs, s.stuck
	s.mu.Unlock()
	if stuck != nil {
		<-stuck
	}
	if _, err := io.WriteString(w, s.content); err != nil {
		return err
	}
	if hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

// countCalls returns how often write was called.
func (s *fakeStore) countCalls() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// repair makes all further calls of write succeed.
func (s *fakeStore) repair() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err, s.hangs = nil, false
}

// startKeeper runs a keeper with virtual time until the test ends. The time starts at 2000-01-01
// 00:00 UTC.
func startKeeper(t *testing.T, o Options, s *fakeStore) *Keeper {
	t.Helper()
	k, err := New(Config{Options: o, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1", Write: s.write,
		Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	})
	virtual.Wait()
	return k
}

func fileNames(t *testing.T, dir string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func checkFiles(t *testing.T, dir string, files ...string) {
	t.Helper()
	if have := fileNames(t, dir); strings.Join(have, " ") != strings.Join(files, " ") {
		t.Fatalf("got\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(files, "\n"))
	}
}

// advanceTime advances the virtual time.
func advanceTime(d time.Duration) {
	time.Sleep(d) // in a bubble
	virtual.Wait()
}

// The first backup is made immediately, and later backups follow the schedule. The configured
// number of backups is kept.
func TestSchedule(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "when missing")
	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{content: "the state"}
		k := startKeeper(t, Options{Schedule: "TZ=UTC 30 2 * * *", Folder: dir, Keep: 2}, s)
		checkFiles(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup")
		if raw, err := os.ReadFile(filepath.Join(dir, "prod-1a2b_cp1_20000101T000000Z.backup")); err != nil ||
			string(raw) != s.content {
			t.Fatalf("the backup has %q, %v", raw, err)
		}
		if info, err := os.Stat(filepath.Join(dir, "prod-1a2b_cp1_20000101T000000Z.backup")); err != nil ||
			info.Mode().Perm() != 0o600 {
			t.Fatalf("mode %v, %v", info.Mode(), err)
		}
		advanceTime(2*time.Hour + 29*time.Minute)
		if n := s.countCalls(); n != 1 {
			t.Fatalf("%d backups were made before the scheduled time", n)
		}
		advanceTime(time.Minute)
		checkFiles(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup", "prod-1a2b_cp1_20000101T023000Z.backup")
		advanceTime(48 * time.Hour)
		checkFiles(t, dir, "prod-1a2b_cp1_20000102T023000Z.backup", "prod-1a2b_cp1_20000103T023000Z.backup")
		at := time.Date(2000, 1, 4, 2, 30, 0, 0, time.UTC)
		if st := k.State(); !st.Next.Equal(at) || st.Size != 9 || st.Failures != 0 {
			t.Fatalf("state: %+v", st)
		}
	})
}

// A schedule without a time zone uses local time, also for the backup after a backup of an earlier
// process.
func TestScheduleInLocalTime(t *testing.T) {
	was := time.Local
	t.Cleanup(func() { time.Local = was })
	time.Local = time.FixedZone("behind", -5*60*60)
	dir := t.TempDir()
	writeFiles(t, dir, map[string][]byte{"prod-1a2b_cp1_19991231T073000Z.backup": nil}) // at 02:30 local time
	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		k := startKeeper(t, Options{Schedule: "30 2 * * *", Folder: dir, Keep: 9}, s)
		if at := time.Date(2000, 1, 1, 7, 30, 0, 0, time.UTC); s.countCalls() != 0 || !k.State().Next.Equal(at) {
			t.Fatalf("%d backups were made, the next one is for %s, want %s", s.countCalls(), k.State().Next, at)
		}
		advanceTime(7*time.Hour + 30*time.Minute)
		advanceTime(time.Minute)
		if at := time.Date(2000, 1, 2, 7, 30, 0, 0, time.UTC); s.countCalls() != 1 || !k.State().Next.Equal(at) {
			t.Fatalf("%d backups were made, the next one is for %s, want %s", s.countCalls(), k.State().Next, at)
		}
	})
}

// Files with other names are kept, also if the names are similar. Incomplete backups are removed.
func TestUnrelatedFilesStay(t *testing.T) {
	dir := t.TempDir()
	others := []string{"notes.txt", "prod-eu_cp1_19990101T000000Z.backup", "prod-1a2b_cp11_19990101T000000Z.backup",
		"prod-1a2b_cp1_1999.backup", "prod-1a2b_cp1_19990101T000000Z.backup.old"}
	for _, name := range append([]string{"prod-1a2b_cp1_19990101T000000Z.backup",
		"prod-1a2b_cp1_19990102T000000Z.backup", "prod-1a2b_cp1_19990103T000000Z.backup.partial"}, others...) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "prod-1a2b_cp1_19980101T000000Z.backup"), 0o700); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		startKeeper(t, Options{Schedule: "@daily", Folder: dir, Keep: 1}, &fakeStore{})
	})
	checkFiles(t, dir, "notes.txt", "prod-1a2b_cp11_19990101T000000Z.backup", "prod-1a2b_cp1_19980101T000000Z.backup",
		"prod-1a2b_cp1_1999.backup",
		"prod-1a2b_cp1_19990101T000000Z.backup.old", "prod-1a2b_cp1_20000101T000000Z.backup",
		"prod-eu_cp1_19990101T000000Z.backup")
}

// A failed backup leaves no file, removes no older backup and is retried. The state reports the
// failure until then.
func TestFailures(t *testing.T) {
	for name, s := range map[string]*fakeStore{
		"full disk":         {content: "half", err: errors.New("no space left on device")},
		"store that blocks": {content: "half", hangs: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir, hangs := t.TempDir(), s.hangs
			old := "prod-1a2b_cp1_19991231T000000Z.backup"
			if err := os.WriteFile(filepath.Join(dir, old), []byte("good"), 0o600); err != nil {
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				k := startKeeper(t, Options{Schedule: "TZ=UTC 0 0 * * *", Folder: dir, Keep: 1}, s)
				advanceTime(5 * time.Hour)
				checkFiles(t, dir, withPartialFile(t, dir, hangs, old)...)
				st := k.State()
				if st.Failures < 3 || st.Failures > 20 || st.Error == nil || st.Since.IsZero() ||
					!st.Last.Equal(time.Date(1999, 12, 31, 0, 0, 0, 0, time.UTC)) {
					t.Fatalf("state after five hours: %+v", st)
				}
				if n := k.failed.Load(); int(n) != st.Failures {
					t.Fatalf("%d failures are counted, want %d", n, st.Failures)
				}
				s.repair()
				advanceTime(2 * time.Hour)
				if st := k.State(); st.Failures != 0 || st.Error != nil {
					t.Fatalf("state after the repair: %+v", st)
				}
				if have := fileNames(t, dir); len(have) != 1 || have[0] == old || strings.HasSuffix(have[0], partial) {
					t.Fatalf("backups after the repair: %v", have)
				}
			})
		})
	}
}

// withPartialFile adds the partial file of an attempt that is in progress.
func withPartialFile(t *testing.T, dir string, hangs bool, files ...string) []string {
	t.Helper()
	have := fileNames(t, dir)
	if last := have[len(have)-1]; hangs && strings.HasSuffix(last, partial) {
		return append(files, last)
	}
	return files
}

// A folder on an unresponsive file server is reported after the timeout of a backup. At most one
// operation waits for it, and Run still stops in time. Backups continue when the folder responds
// again.
func TestUnresponsiveFolder(t *testing.T) {
	dir := t.TempDir()
	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{content: "the state", stuck: make(chan struct{})}
		k, err := New(Config{Options: Options{Schedule: "@daily", Folder: dir, Keep: 9}, Cluster: "prod",
			ID: "prod-1a2b", Replica: "cp1", Write: s.write, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		run := func() (end func()) {
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- k.Run(ctx) }()
			return func() {
				t.Helper()
				cancel()
				advanceTime(cancelGrace)
				select {
				case err := <-ended:
					if !errors.Is(err, context.Canceled) {
						t.Errorf("Run ended with %v", err)
					}
				default:
					close(s.stuck)
					t.Fatal("Run has not ended")
				}
			}
		}
		end := run()
		advanceTime(backupTimeout + time.Minute)
		if st := k.State(); st.Failures < 1 || st.Error == nil ||
			!strings.Contains(st.Error.Error(), dir+" does not respond") {
			t.Errorf("state after more than an hour: %+v", st)
		}
		advanceTime(5 * time.Hour)
		if st := k.State(); s.countCalls() != 1 || st.Failures < 3 ||
			!strings.Contains(st.Error.Error(), dir+" does not respond") {
			t.Errorf("after six hours: %d attempts, state %+v", s.countCalls(), st)
		}
		end()
		end = run()
		advanceTime(time.Hour)
		if n := s.countCalls(); n != 1 {
			t.Errorf("%d attempts after a restart", n)
		}
		close(s.stuck)
		virtual.Wait()
		checkFiles(t, dir) // an abandoned operation creates no backup
		advanceTime(time.Hour)
		if st := k.State(); st.Error != nil || len(fileNames(t, dir)) != 1 {
			t.Errorf("after the folder responds again: %v, state %+v", fileNames(t, dir), st)
		}
		end()
	})
}

// If the folder cannot be created, the error is reported and Run continues.
func TestFolderCannotBeCreated(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		k := startKeeper(t, Options{Schedule: "@hourly", Folder: filepath.Join(file, "below"), Keep: 1}, &fakeStore{})
		if st := k.State(); st.Error == nil || !strings.Contains(st.Error.Error(), file) {
			t.Fatalf("state: %+v", st)
		}
	})
}

// Backups continue after the clock was set back.
func TestClockSetBack(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "prod-1a2b_cp1_20300101T000000Z.backup"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		s := &fakeStore{}
		startKeeper(t, Options{Schedule: "@every 1h", Folder: dir, Keep: 3}, s)
		advanceTime(time.Hour + time.Minute)
		if n := s.countCalls(); n != 2 {
			t.Fatalf("%d backups were made in the first hour, want 2", n)
		}
		advanceTime(time.Hour)
		checkFiles(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup", "prod-1a2b_cp1_20000101T010000Z.backup",
			"prod-1a2b_cp1_20000101T020000Z.backup")

	})
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    Options
		says string // "" = valid
	}{
		{Options{}, ""},
		{Options{Schedule: "@daily", Folder: "/backups", Keep: 1}, ""},
		{Options{Folder: "/backups", Keep: 1}, "--backup-schedule"},
		{Options{Schedule: "every day", Folder: "/backups", Keep: 1}, `--backup-schedule "every day"`},
		{Options{Schedule: "TZ=UTC", Folder: "/backups", Keep: 1}, "--backup-schedule"},
		{Options{Schedule: "0 0 31 2 *", Folder: "/backups", Keep: 1}, "it never occurs"},
		{Options{Schedule: "@daily", Keep: 1}, "--backup-folder"},
		{Options{Schedule: "@daily", Folder: "backups", Keep: 1}, `--backup-folder "backups"`},
		{Options{Schedule: "@daily", Folder: "/backups"}, "--backup-keep 0"},
	} {
		err := c.o.Check()
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.says)
		}
	}
}

// A file that is damaged while it is written does not become a backup.
func TestReadBack(t *testing.T) {
	dir := t.TempDir()
	f := folder{path: dir, prefix: "prod-1a2b_cp1_"}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	_, err := f.writeBackup(t.Context(), at, func(_ context.Context, w io.Writer) error {
		if _, err := w.Write(bytes.Repeat([]byte("state"), 1000)); err != nil {
			return err
		}
		out, err := os.OpenFile(f.backupName(at)+partial, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = out.WriteAt([]byte("?"), 700)
		return errors.Join(err, out.Close())
	})

	if err == nil || !strings.Contains(err.Error(), "differs from the data that was written") {
		t.Fatalf("got %v", err)
	}
	checkFiles(t, dir)
}
