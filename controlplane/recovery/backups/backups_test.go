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

// store is what backups are made of.
type store struct {
	content string

	mu    sync.Mutex
	err   error
	hangs bool
	stuck chan struct{} // what is written does not come back until it is closed, whatever ends meanwhile; nil = it does
	asked int
}

func (s *store) write(ctx context.Context, w io.Writer) error {
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

// backups is how many were asked for.
func (s *store) backups() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

// works makes it work from now on.
func (s *store) works() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err, s.hangs = nil, false
}

// begin runs a keeper in a bubble until the test ends. now is 2000-01-01 00:00 UTC, as in every bubble.
func begin(t *testing.T, o Options, s *store) *Keeper {
	t.Helper()
	k, err := New(Config{Options: o, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1", Write: s.write, Log: slog.New(slog.DiscardHandler)})
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

func names(t *testing.T, dir string) (out []string) {
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

func want(t *testing.T, dir string, files ...string) {
	t.Helper()
	if have := names(t, dir); strings.Join(have, " ") != strings.Join(files, " ") {
		t.Fatalf("there are\n%s\nwant\n%s", strings.Join(have, "\n"), strings.Join(files, "\n"))
	}
}

// pass lets virtual time pass.
func pass(d time.Duration) {
	time.Sleep(d) // in a bubble
	virtual.Wait()
}

// The first backup is made at once, the others when the schedule says, and as many stay as are to be kept.
func TestSchedule(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "when missing")
	virtual.Test(t, func(t *testing.T) {
		s := &store{content: "the state"}
		k := begin(t, Options{Schedule: "TZ=UTC 30 2 * * *", Folder: dir, Keep: 2}, s)
		want(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup")
		if raw, err := os.ReadFile(filepath.Join(dir, "prod-1a2b_cp1_20000101T000000Z.backup")); err != nil || string(raw) != s.content {
			t.Fatalf("it holds %q, %v", raw, err)
		}
		if info, err := os.Stat(filepath.Join(dir, "prod-1a2b_cp1_20000101T000000Z.backup")); err != nil || info.Mode().Perm() != 0o600 {
			t.Fatalf("its mode is %v, %v", info.Mode(), err)
		}
		pass(2*time.Hour + 29*time.Minute)
		if n := s.backups(); n != 1 {
			t.Fatalf("%d backups were made before it was time", n)
		}
		pass(time.Minute)
		want(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup", "prod-1a2b_cp1_20000101T023000Z.backup")
		pass(48 * time.Hour)
		want(t, dir, "prod-1a2b_cp1_20000102T023000Z.backup", "prod-1a2b_cp1_20000103T023000Z.backup")
		at := time.Date(2000, 1, 4, 2, 30, 0, 0, time.UTC)
		if st := k.State(); !st.Next.Equal(at) || st.Size != 9 || st.Failures != 0 {
			t.Fatalf("it says %+v", st)
		}
	})
}

// A schedule without a zone is one in local time, also when the newest backup was made before the process began.
func TestScheduleInLocalTime(t *testing.T) {
	was := time.Local
	t.Cleanup(func() { time.Local = was })
	time.Local = time.FixedZone("behind", -5*60*60)
	dir := t.TempDir()
	put(t, dir, map[string][]byte{"prod-1a2b_cp1_19991231T073000Z.backup": nil}) // made at 02:30
	virtual.Test(t, func(t *testing.T) {
		s := &store{}
		k := begin(t, Options{Schedule: "30 2 * * *", Folder: dir, Keep: 9}, s)
		if at := time.Date(2000, 1, 1, 7, 30, 0, 0, time.UTC); s.backups() != 0 || !k.State().Next.Equal(at) {
			t.Fatalf("%d backups were made, the next one is for %s, want %s", s.backups(), k.State().Next, at)
		}
		pass(7*time.Hour + 30*time.Minute)
		pass(time.Minute)
		if at := time.Date(2000, 1, 2, 7, 30, 0, 0, time.UTC); s.backups() != 1 || !k.State().Next.Equal(at) {
			t.Fatalf("%d backups were made, the next one is for %s, want %s", s.backups(), k.State().Next, at)
		}
	})
}

// What other names is in the folder stays, also what looks like them; what was never whole goes.
func TestOthersFilesStay(t *testing.T) {
	dir := t.TempDir()
	others := []string{"notes.txt", "prod-eu_cp1_19990101T000000Z.backup", "prod-1a2b_cp11_19990101T000000Z.backup", "prod-1a2b_cp1_1999.backup", "prod-1a2b_cp1_19990101T000000Z.backup.old"}
	for _, name := range append([]string{"prod-1a2b_cp1_19990101T000000Z.backup", "prod-1a2b_cp1_19990102T000000Z.backup", "prod-1a2b_cp1_19990103T000000Z.backup.partial"}, others...) {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "prod-1a2b_cp1_19980101T000000Z.backup"), 0o700); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		begin(t, Options{Schedule: "@daily", Folder: dir, Keep: 1}, &store{})
	})
	want(t, dir, "notes.txt", "prod-1a2b_cp11_19990101T000000Z.backup", "prod-1a2b_cp1_19980101T000000Z.backup", "prod-1a2b_cp1_1999.backup",
		"prod-1a2b_cp1_19990101T000000Z.backup.old", "prod-1a2b_cp1_20000101T000000Z.backup", "prod-eu_cp1_19990101T000000Z.backup")
}

// A backup that fails leaves nothing, costs no older one and is tried again; the state says so meanwhile.
func TestFailures(t *testing.T) {
	for name, s := range map[string]*store{
		"a disk that is full": {content: "half", err: errors.New("no space left on device")},
		"a store that hangs":  {content: "half", hangs: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir, hangs := t.TempDir(), s.hangs
			old := "prod-1a2b_cp1_19991231T000000Z.backup"
			if err := os.WriteFile(filepath.Join(dir, old), []byte("good"), 0o600); err != nil {
				t.Fatal(err)
			}
			virtual.Test(t, func(t *testing.T) {
				k := begin(t, Options{Schedule: "TZ=UTC 0 0 * * *", Folder: dir, Keep: 1}, s)
				pass(5 * time.Hour)
				want(t, dir, partialsAside(t, dir, hangs, old)...)
				st := k.State()
				if st.Failures < 3 || st.Failures > 20 || st.Error == nil || st.Since.IsZero() || !st.Last.Equal(time.Date(1999, 12, 31, 0, 0, 0, 0, time.UTC)) {
					t.Fatalf("after five hours it says %+v", st)
				}
				if n := k.failed.Load(); int(n) != st.Failures {
					t.Fatalf("%d failures are counted, want %d", n, st.Failures)
				}
				s.works()
				pass(2 * time.Hour)
				if st := k.State(); st.Failures != 0 || st.Error != nil {
					t.Fatalf("when it works again it says %+v", st)
				}
				if have := names(t, dir); len(have) != 1 || have[0] == old || strings.HasSuffix(have[0], partial) {
					t.Fatalf("when it works again there are %v", have)
				}
			})
		})
	}
}

// partialsAside adds the file that an attempt which hangs just now is writing.
func partialsAside(t *testing.T, dir string, hangs bool, files ...string) []string {
	t.Helper()
	have := names(t, dir)
	if last := have[len(have)-1]; hangs && strings.HasSuffix(last, partial) {
		return append(files, last)
	}
	return files
}

// A folder that answers no more, as one of a server that is gone, is told of when a backup could long have been made, has one
// attempt at a time wait for it, and keeps nothing from ending. When it answers again backups go on.
func TestFolderThatHangs(t *testing.T) {
	dir := t.TempDir()
	virtual.Test(t, func(t *testing.T) {
		s := &store{content: "the state", stuck: make(chan struct{})}
		k, err := New(Config{Options: Options{Schedule: "@daily", Folder: dir, Keep: 9}, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1", Write: s.write, Log: slog.New(slog.DiscardHandler)})
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
				pass(farewell)
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
		pass(mostTime + time.Minute)
		if st := k.State(); st.Failures < 1 || st.Error == nil || !strings.Contains(st.Error.Error(), dir+" does not answer") {
			t.Errorf("after more than an hour it says %+v", st)
		}
		pass(5 * time.Hour)
		if st := k.State(); s.backups() != 1 || st.Failures < 3 || !strings.Contains(st.Error.Error(), dir+" does not answer") {
			t.Errorf("after six hours %d attempts wait for it, and it says %+v", s.backups(), st)
		}
		end()
		end = run()
		pass(time.Hour)
		if n := s.backups(); n != 1 {
			t.Errorf("when it was begun again %d attempts wait for it", n)
		}
		close(s.stuck)
		virtual.Wait()
		want(t, dir) // what was given up gets no name
		pass(time.Hour)
		if st := k.State(); st.Error != nil || len(names(t, dir)) != 1 {
			t.Errorf("when it answers again there are %v, and it says %+v", names(t, dir), st)
		}
		end()
	})
}

// A folder that cannot be made is an error that is told, and no reason to end.
func TestFolderInTheWay(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		k := begin(t, Options{Schedule: "@hourly", Folder: filepath.Join(file, "below"), Keep: 1}, &store{})
		if st := k.State(); st.Error == nil || !strings.Contains(st.Error.Error(), file) {
			t.Fatalf("it says %+v", st)
		}
	})
}

// A clock that was set back does not stop backups until it has caught up.
func TestClockSetBack(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "prod-1a2b_cp1_20300101T000000Z.backup"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	virtual.Test(t, func(t *testing.T) {
		s := &store{}
		begin(t, Options{Schedule: "@every 1h", Folder: dir, Keep: 3}, s)
		pass(time.Hour + time.Minute)
		if n := s.backups(); n != 2 {
			t.Fatalf("%d backups were made at the beginning and in an hour", n)
		}
		pass(time.Hour)
		want(t, dir, "prod-1a2b_cp1_20000101T000000Z.backup", "prod-1a2b_cp1_20000101T010000Z.backup", "prod-1a2b_cp1_20000101T020000Z.backup")
	})
}

func TestOptions(t *testing.T) {
	for _, c := range []struct {
		o    Options
		says string // "" = good
	}{
		{Options{}, ""},
		{Options{Schedule: "@daily", Folder: "/backups", Keep: 1}, ""},
		{Options{Folder: "/backups", Keep: 1}, "--backup-schedule"},
		{Options{Schedule: "every day", Folder: "/backups", Keep: 1}, `--backup-schedule "every day"`},
		{Options{Schedule: "TZ=UTC", Folder: "/backups", Keep: 1}, "--backup-schedule"},
		{Options{Schedule: "0 0 31 2 *", Folder: "/backups", Keep: 1}, "there is no such time"},
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

// Whoever reads a file that is damaged on its way to the disk must not take it for a backup.
func TestReadBack(t *testing.T) {
	dir := t.TempDir()
	f := folder{path: dir, prefix: "prod-1a2b_cp1_"}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	_, err := f.write(t.Context(), at, func(_ context.Context, w io.Writer) error {
		if _, err := w.Write(bytes.Repeat([]byte("state"), 1000)); err != nil {
			return err
		}
		out, err := os.OpenFile(f.name(at)+partial, os.O_WRONLY, 0) // the disk turns a byte
		if err != nil {
			return err
		}
		_, err = out.WriteAt([]byte("?"), 700)
		return errors.Join(err, out.Close())
	})
	if err == nil || !strings.Contains(err.Error(), "does not hold what was written") {
		t.Fatalf("it says %v", err)
	}
	want(t, dir)
}
