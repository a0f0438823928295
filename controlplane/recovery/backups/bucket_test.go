package backups

import (
	"context"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"

	"keelson.dev/keelson/internal/virtual"
)

// fakeBucket is an HTTPS S3 server with a bucket "vault". The function before can respond to any
// request in place of the server.
type fakeBucket struct {
	*s3mem.Backend
	s3 S3
}

func startBucket(t *testing.T, before func(w http.ResponseWriter, r *http.Request) (answered bool)) *fakeBucket {
	t.Helper()
	s := &fakeBucket{Backend: s3mem.New()}
	if err := s.CreateBucket("vault"); err != nil {
		t.Fatal(err)
	}
	real := gofakes3.New(s.Backend).Server()
	srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if before == nil || !before(w, r) {
			real.ServeHTTP(w, r)
		}
	}))
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	dir := t.TempDir()
	ca, keys := filepath.Join(dir, "ca"), filepath.Join(dir, "keys")
	err := errors.Join(
		os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600),
		os.WriteFile(keys, []byte("[default]\naws_access_key_id = AKID\naws_secret_access_key = hidden\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	s.s3 = S3{URL: "s3://vault/of/ours", Endpoint: srv.URL, Region: "us-east-1", PathStyle: true,
		Credentials: keys, CA: ca}
	return s
}

// newBucket returns the target for the backups of a replica.
func (s *fakeBucket) newBucket(t *testing.T, replica string) *bucket {
	t.Helper()
	b, err := newBucket(s.s3, "prod-1a2b", replica)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (s *fakeBucket) objectNames(t *testing.T) (out []string) {
	t.Helper()
	l, err := s.ListBucket("vault", &gofakes3.Prefix{}, gofakes3.ListBucketPage{})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range l.Contents {
		out = append(out, o.Key)
	}
	return out
}

func (s *fakeBucket) putObjects(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := s.PutObject("vault", name, nil, strings.NewReader("x"), 1, nil); err != nil {
			t.Fatal(err)
		}
	}
}

func writerOf(s string) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

// A backup in several parts is complete. Objects with other names are kept. The oldest backup of
// the cluster is removed, regardless of the replica that made it.
func TestBucket(t *testing.T) {
	s := startBucket(t, nil)
	others := []string{"of/ours/notes.txt", "of/ours/prod-1a2b_cp1_yesterday.backup",
		"of/ours/prod-1a2c_cp1_19990101T000000Z.backup", "of/prod-1a2b_cp1_19990101T000000Z.backup"}
	s.putObjects(t, others...)
	s.putObjects(t, "of/ours/prod-1a2b_cp2_19990101T000000Z.backup")
	b := s.newBucket(t, "cp1")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	state := make([]byte, 2*partBytes+777)
	rand.Read(state)
	n, err := b.writeBackup(t.Context(), at, writerOf(string(state)))
	if err != nil || n != int64(len(state)) {
		t.Fatalf("wrote %d bytes, %v", n, err)
	}
	o, err := s.GetObject("vault", "of/ours/prod-1a2b_cp1_20260102T030405Z.backup", nil)
	if err != nil {
		t.Fatal(err)
	}
	if have, err := io.ReadAll(o.Contents); err != nil || string(have) != string(state) {
		t.Fatalf("the object has %d bytes or differs, %v", len(have), err)
	}
	all, err := b.listBackups(t.Context(), at)
	if err != nil || len(all) != 2 || !all[1].madeAt.Equal(at) {
		t.Fatalf("listed %v, %v", all, err)
	}
	removed, err := b.pruneBackups(t.Context(), at, 1)
	if err != nil || len(removed) != 1 || removed[0] != "of/ours/prod-1a2b_cp2_19990101T000000Z.backup" {
		t.Fatalf("removed %v, %v", removed, err)
	}
	if have := s.objectNames(t); !slices.Equal(slices.Sorted(slices.Values(have)),
		slices.Sorted(slices.Values(append(others, "of/ours/prod-1a2b_cp1_20260102T030405Z.backup")))) {
		t.Fatalf("got %q", have)
	}
}

// Whatever a server does, an attempt ends with an error that names the reason, and no object has
// the name of a backup.
func TestHostileServer(t *testing.T) {
	matches := func(method, query string) func(r *http.Request) bool {
		return func(r *http.Request) bool { return r.Method == method && strings.Contains(r.URL.RawQuery, query) }
	}
	// Long names: the size of a response is bounded, and with the race detector, parsing many short
	// names takes seconds.
	entry := "<Contents><Key>" + strings.Repeat("a", 1000) + "</Key></Contents>"
	endless := func(w http.ResponseWriter, r *http.Request) {
		_, err := io.WriteString(w, "<ListBucketResult>")
		for err == nil {
			_, err = io.WriteString(w, entry)
		}
	}
	hang := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // otherwise the end of the connection is not noticed
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // otherwise the canceled request would get a response, which could still arrive
	}
	for name, c := range map[string]struct {
		on   func(*http.Request) bool
		do   func(http.ResponseWriter, *http.Request)
		says string
	}{
		"writing is forbidden": {matches("PUT", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(403)
		}, "Access Denied"},
		"starting is forbidden": {matches("POST", "uploads"), func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(403)
		}, "Access Denied"},
		"blocks on a part":         {matches("PUT", ""), hang, "made no progress"},
		"blocks on the completion": {matches("POST", "uploadId"), hang, "made no progress"},
		"endless response":         {matches("POST", "uploads"), endless, "is too large"},
		"different content": {matches("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			w.Header().Set("ETag", `"x"`)
			_, _ = io.WriteString(w, "the stata")
		}, "differs from the data that was sent"},
		"too short": {matches("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			w.Header().Set("Content-Length", "9")
			_, _ = io.WriteString(w, "the")
		}, "unexpected EOF"},
		"endless content": {matches("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			_, err := io.WriteString(w, "the state")
			for err == nil {
				_, err = w.Write(make([]byte, 1<<16))
			}
		}, "differs from the data that was sent"},
	} {
		t.Run(name, func(t *testing.T) {
			s := startBucket(t, func(w http.ResponseWriter, r *http.Request) bool {
				if !c.on(r) || r.Method == "GET" && r.URL.RawQuery != "" {
					return false
				}
				c.do(w, r)
				return true
			})
			b := s.newBucket(t, "cp1")
			if strings.HasPrefix(name, "blocks") {
				b.stallTimeout = 200 * time.Millisecond
			}
			_, err := b.writeBackup(t.Context(), time.Now(), writerOf("the state"))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("error %v, want %q", err, c.says)
			}
			if have := s.objectNames(t); len(have) != 0 {
				t.Errorf("got %q", have)
			}
		})
	}
	t.Run("an endless list", func(t *testing.T) {
		s := startBucket(t, func(w http.ResponseWriter, r *http.Request) bool { endless(w, r); return true })
		if _, err := s.newBucket(t, "cp1").listBackups(t.Context(), time.Now()); err == nil ||
			!strings.Contains(err.Error(), "is too large") {
			t.Errorf("got %v", err)
		}
	})
}

// A request is repeated after responses with status 500, but not forever.
func TestBucketRetries(t *testing.T) {
	var calls atomic.Int64
	bad := int64(2)
	s := startBucket(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == "PUT" && calls.Add(1) <= bad {
			w.WriteHeader(500)
			return true
		}
		return false
	})
	if _, err := s.newBucket(t, "cp1").writeBackup(t.Context(), time.Now(), writerOf("the state")); err != nil ||
		calls.Load() != 3 {
		t.Fatalf("after %d calls: %v", calls.Load(), err)
	}
	calls.Store(0)
	bad = 1000
	if _, err := s.newBucket(t, "cp2").writeBackup(t.Context(), time.Now(), writerOf("the state")); err == nil ||
		calls.Load() > maxAttempts+1 {
		t.Fatalf("after %d calls: %v", calls.Load(), err)
	}
}

// No backup is left if the store fails while it writes, or if the replica loses leadership.
func TestIncompleteBackupIsRemoved(t *testing.T) {
	s := startBucket(t, nil)
	_, err := s.newBucket(t, "cp1").writeBackup(t.Context(), time.Now(), func(_ context.Context, w io.Writer) error {
		_, _ = w.Write(make([]byte, partBytes+1))
		return errors.New("the disk is gone")
	})

	if err == nil || !strings.Contains(err.Error(), "the disk is gone") {
		t.Errorf("got %v", err)
	}
	leads := true
	k, err := New(Config{Options: Options{Schedule: "@daily", Keep: 1, S3: s.s3}, Cluster: "prod", ID: "prod-1a2b",
		Replica:  "cp1",
		IsLeader: func() bool { return leads }, Log: slog.New(slog.DiscardHandler),
		Write: func(_ context.Context, w io.Writer) error {
			_, err := io.WriteString(w, "half")
			leads = false
			if err == nil {
				_, err = io.WriteString(w, "the rest")
			}
			return err
		}})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.makeBackup(t.Context()); !errors.Is(err, errNotLeader) {
		t.Errorf("got %v", err)
	}
	if have := s.objectNames(t); len(have) != 0 {
		t.Errorf("got %q", have)
	}
}

// memoryTarget is a target in memory that all replicas share.
type memoryTarget struct {
	target
	made []storedBackup
}

func (r *memoryTarget) String() string              { return "rows" }
func (r *memoryTarget) backupName(time.Time) string { return "" }
func (r *memoryTarget) listBackups(context.Context, time.Time) ([]storedBackup, error) {
	return r.made, nil
}
func (r *memoryTarget) pruneBackups(context.Context, time.Time, int) ([]string, error) {
	return nil, nil
}
func (r *memoryTarget) writeBackup(ctx context.Context, at time.Time, write func(context.Context, io.Writer) error) (
	int64, error,
) {
	if err := write(ctx, io.Discard); err != nil {
		return 0, err
	}
	r.made = append(r.made, storedBackup{madeAt: at})
	return 1, nil
}

// Of three replicas with the same schedule and bucket, only the leader writes, once per scheduled
// time, also after a leader change.
func TestOnlyTheLeaderWrites(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var leader atomic.Pointer[string]
		lead := func(name string) { leader.Store(&name) }
		lead("cp2")
		all := &memoryTarget{}
		stores := map[string]*fakeStore{}
		for _, name := range []string{"cp1", "cp2", "cp3"} {
			stores[name] = &fakeStore{content: "the state"}
			k, err := New(Config{Cluster: "prod", ID: "prod-1a2b", Replica: name, Write: stores[name].write,
				Log: slog.New(slog.DiscardHandler),
				Options: Options{Schedule: "TZ=UTC 0 * * * *", Keep: 9,
					S3: S3{URL: "s3://vault", Endpoint: "https://s3.test", Region: "x"}},
				IsLeader: func() bool { return *leader.Load() == name }})
			if err != nil {
				t.Fatal(err)
			}
			k.target = all
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			go func() { _ = k.Run(ctx) }()
			t.Cleanup(func() { cancel(); virtual.Wait() })
		}
		backupCounts := func() string {
			return fmt.Sprint(stores["cp1"].countCalls(), stores["cp2"].countCalls(), stores["cp3"].countCalls())
		}
		advanceTime(3*time.Hour + time.Minute)
		if have := backupCounts(); have != "0 4 0" {
			t.Fatalf("cp2 leads; backups per replica: %s", have)
		}
		lead("cp3")
		advanceTime(2 * time.Hour)
		if have := backupCounts(); have != "0 4 2" {
			t.Fatalf("cp3 leads; backups per replica: %s", have)
		}
	})
}

// A replica with '_' in its name finds its own backups: the last '_' in a name separates the time.
func TestReplicaNameWithUnderscore(t *testing.T) {
	s := startBucket(t, nil)
	b := s.newBucket(t, "cp_1")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range 3 {
		if _, err := b.writeBackup(t.Context(), at.Add(time.Duration(i)*time.Hour), writerOf("the state")); err != nil {
			t.Fatal(err)
		}
	}
	all, err := s.newBucket(t, "cp2").listBackups(t.Context(), at.Add(24*time.Hour))
	if err != nil || len(all) != 3 || !all[0].madeAt.Equal(at) {
		t.Fatalf("another replica lists %v, %v", all, err)
	}
	if removed, err := b.pruneBackups(t.Context(), at.Add(24*time.Hour), 1); err != nil || len(removed) != 2 {
		t.Fatalf("removed %v, %v", removed, err)
	}
}

func TestS3Options(t *testing.T) {
	good := S3{URL: "s3://vault/of/ours", Endpoint: "https://s3.example:9000", Region: "us-east-1"}
	for _, c := range []struct {
		change func(*Options)
		says   string // "" = valid
	}{
		{func(o *Options) {}, ""},
		{func(o *Options) { o.S3.URL = "s3://vault" }, ""},
		{func(o *Options) { o.Schedule = "" }, "--backup-s3 requires"},
		{func(o *Options) { o.Folder = "/backups" }, "want one of them"},
		{func(o *Options) { o.S3.URL = "vault/of/ours" }, "s3://BUCKET"},
		{func(o *Options) { o.S3.URL = "s3://vault/../other" }, "s3://BUCKET"},
		{func(o *Options) { o.S3.URL = "s3://" }, "s3://BUCKET"},
		{func(o *Options) { o.S3.Endpoint = "s3.example" }, "--backup-s3-endpoint"},
		{func(o *Options) { o.S3.Endpoint = "https://key:secret@s3.example" }, "--backup-s3-endpoint"},
		{func(o *Options) { o.S3.Region = "" }, "--backup-s3-region"},
	} {
		o := Options{Schedule: "@daily", Keep: 1, S3: good}
		c.change(&o)
		if err := o.Check(); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %q", o, err, c.says)
		}
	}
}

// No request is sent without a key file that only this replica can read, or to a server with an
// untrusted certificate.
func TestS3Keys(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "")
	t.Setenv("AWS_ACCESS_KEY", "")
	t.Setenv("AWS_SECRET_KEY", "")
	for name, c := range map[string]struct {
		change func(*testing.T, *S3)
		says   string
	}{
		"readable by others": {func(t *testing.T, s *S3) {
			if err := os.Chmod(s.Credentials, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "make its mode 0600"},
		"none":              {func(_ *testing.T, s *S3) { s.Credentials = "" }, "none found"},
		"missing":           {func(_ *testing.T, s *S3) { s.Credentials += "x" }, "no such file"},
		"another authority": {func(_ *testing.T, s *S3) { s.CA = "" }, "certificate"},
		"no certificate":    {func(_ *testing.T, s *S3) { s.CA = s.Credentials }, "contains no certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			called := false
			s := startBucket(t, func(http.ResponseWriter, *http.Request) bool { called = true; return false })
			c.change(t, &s.s3)
			_, err := s.newBucket(t, "cp1").listBackups(t.Context(), time.Now())
			if err == nil || !strings.Contains(err.Error(), c.says) || called {
				t.Errorf("error %v, want %q; called: %v", err, c.says, called)
			}
			if err != nil && strings.Contains(err.Error(), "hidden") {
				t.Errorf("the error contains the key: %v", err)
			}
		})
	}
}
