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

// shop is an S3 server with a bucket "vault", by TLS. Every call passes before first, which may answer it.
type shop struct {
	*s3mem.Backend
	s3 S3
}

func open(t *testing.T, before func(w http.ResponseWriter, r *http.Request) (answered bool)) *shop {
	t.Helper()
	s := &shop{Backend: s3mem.New()}
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
	s.s3 = S3{URL: "s3://vault/of/ours", Endpoint: srv.URL, Region: "us-east-1", PathStyle: true, Credentials: keys, CA: ca}
	return s
}

// bucket is the place of a replica's backups.
func (s *shop) bucket(t *testing.T, replica string) *bucket {
	t.Helper()
	b, err := newBucket(s.s3, "prod-1a2b", replica)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (s *shop) names(t *testing.T) (out []string) {
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

func (s *shop) put(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if _, err := s.PutObject("vault", name, nil, strings.NewReader("x"), 1, nil); err != nil {
			t.Fatal(err)
		}
	}
}

func content(s string) func(context.Context, io.Writer) error {
	return func(_ context.Context, w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

// A backup in parts is what was written, names of others stay, and the oldest of the cluster goes, whichever replica made it.
func TestBucket(t *testing.T) {
	s := open(t, nil)
	others := []string{"of/ours/notes.txt", "of/ours/prod-1a2b_cp1_yesterday.backup", "of/ours/prod-1a2c_cp1_19990101T000000Z.backup", "of/prod-1a2b_cp1_19990101T000000Z.backup"}
	s.put(t, others...)
	s.put(t, "of/ours/prod-1a2b_cp2_19990101T000000Z.backup")
	b := s.bucket(t, "cp1")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	state := make([]byte, 2*partBytes+777)
	rand.Read(state)
	n, err := b.write(t.Context(), at, content(string(state)))
	if err != nil || n != int64(len(state)) {
		t.Fatalf("%d bytes are written, %v", n, err)
	}
	o, err := s.GetObject("vault", "of/ours/prod-1a2b_cp1_20260102T030405Z.backup", nil)
	if err != nil {
		t.Fatal(err)
	}
	if have, err := io.ReadAll(o.Contents); err != nil || string(have) != string(state) {
		t.Fatalf("there are %d bytes, or others, %v", len(have), err)
	}
	all, err := b.list(t.Context(), at)
	if err != nil || len(all) != 2 || !all[1].of.Equal(at) {
		t.Fatalf("the list is %v, %v", all, err)
	}
	removed, err := b.prune(t.Context(), at, 1)
	if err != nil || len(removed) != 1 || removed[0] != "of/ours/prod-1a2b_cp2_19990101T000000Z.backup" {
		t.Fatalf("removed are %v, %v", removed, err)
	}
	if have := s.names(t); !slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(append(others, "of/ours/prod-1a2b_cp1_20260102T030405Z.backup")))) {
		t.Fatalf("there are %q", have)
	}
}

// Whatever a server does, an attempt ends with an error that says what, and nothing has the name of a backup.
func TestHostileServer(t *testing.T) {
	is := func(method, query string) func(r *http.Request) bool {
		return func(r *http.Request) bool { return r.Method == method && strings.Contains(r.URL.RawQuery, query) }
	}
	// Long keys: the size of an answer is bounded, and the parser of short ones takes seconds with the race detector.
	entry := "<Contents><Key>" + strings.Repeat("a", 1000) + "</Key></Contents>"
	endless := func(w http.ResponseWriter, r *http.Request) {
		_, err := io.WriteString(w, "<ListBucketResult>")
		for err == nil {
			_, err = io.WriteString(w, entry)
		}
	}
	hang := func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // else the end of the connection is not seen
		<-r.Context().Done()
		panic(http.ErrAbortHandler) // else the end of the call would be answered, and that could still arrive
	}
	for name, c := range map[string]struct {
		on   func(*http.Request) bool
		do   func(http.ResponseWriter, *http.Request)
		says string
	}{
		"no right to write": {is("PUT", ""), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) }, "Access Denied"},
		"no right to begin": {is("POST", "uploads"), func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(403) }, "Access Denied"},
		"hangs on a part":   {is("PUT", ""), hang, "neither took nor gave"},
		"hangs on the end":  {is("POST", "uploadId"), hang, "neither took nor gave"},
		"says no end of it": {is("POST", "uploads"), endless, "longer than any"},
		"other content": {is("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			w.Header().Set("ETag", `"x"`)
			_, _ = io.WriteString(w, "the stata")
		}, "does not hold what was sent"},
		"too short": {is("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			w.Header().Set("Content-Length", "9")
			_, _ = io.WriteString(w, "the")
		}, "unexpected EOF"},
		"never stops": {is("GET", ""), func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
			_, err := io.WriteString(w, "the state")
			for err == nil {
				_, err = w.Write(make([]byte, 1<<16))
			}
		}, "does not hold what was sent"},
	} {
		t.Run(name, func(t *testing.T) {
			s := open(t, func(w http.ResponseWriter, r *http.Request) bool {
				if !c.on(r) || r.Method == "GET" && r.URL.RawQuery != "" {
					return false
				}
				c.do(w, r)
				return true
			})
			b := s.bucket(t, "cp1")
			if strings.HasPrefix(name, "hangs") {
				b.silence = 200 * time.Millisecond
			}
			_, err := b.write(t.Context(), time.Now(), content("the state"))
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("it says %v, want %q", err, c.says)
			}
			if have := s.names(t); len(have) != 0 {
				t.Errorf("there are %q", have)
			}
		})
	}
	t.Run("an endless list", func(t *testing.T) {
		s := open(t, func(w http.ResponseWriter, r *http.Request) bool { endless(w, r); return true })
		if _, err := s.bucket(t, "cp1").list(t.Context(), time.Now()); err == nil || !strings.Contains(err.Error(), "longer than any") {
			t.Errorf("it says %v", err)
		}
	})
}

// Some answers of 500 are no reason to fail; a call is not repeated for ever.
func TestBucketRepeats(t *testing.T) {
	var calls atomic.Int64
	bad := int64(2)
	s := open(t, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == "PUT" && calls.Add(1) <= bad {
			w.WriteHeader(500)
			return true
		}
		return false
	})
	if _, err := s.bucket(t, "cp1").write(t.Context(), time.Now(), content("the state")); err != nil || calls.Load() != 3 {
		t.Fatalf("after %d calls: %v", calls.Load(), err)
	}
	calls.Store(0)
	bad = 1000
	if _, err := s.bucket(t, "cp2").write(t.Context(), time.Now(), content("the state")); err == nil || calls.Load() > tries+1 {
		t.Fatalf("after %d calls: %v", calls.Load(), err)
	}
}

// A store that fails half way makes no backup, and neither does a replica that ceases to lead.
func TestHalfABackup(t *testing.T) {
	s := open(t, nil)
	_, err := s.bucket(t, "cp1").write(t.Context(), time.Now(), func(_ context.Context, w io.Writer) error {
		_, _ = w.Write(make([]byte, partBytes+1)) // a part is away
		return errors.New("the disk is gone")
	})
	if err == nil || !strings.Contains(err.Error(), "the disk is gone") {
		t.Errorf("it says %v", err)
	}
	leads := true
	k, err := New(Config{Options: Options{Schedule: "@daily", Keep: 1, S3: s.s3}, Cluster: "prod", ID: "prod-1a2b", Replica: "cp1",
		Leads: func() bool { return leads }, Log: slog.New(slog.DiscardHandler),
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
	if err := k.once(t.Context()); !errors.Is(err, errOthers) {
		t.Errorf("it says %v", err)
	}
	if have := s.names(t); len(have) != 0 {
		t.Errorf("there are %q", have)
	}
}

// rows is a target in memory that all replicas share.
type rows struct {
	target
	made []one
}

func (r *rows) String() string                                          { return "rows" }
func (r *rows) name(time.Time) string                                   { return "" }
func (r *rows) list(context.Context, time.Time) ([]one, error)          { return r.made, nil }
func (r *rows) prune(context.Context, time.Time, int) ([]string, error) { return nil, nil }
func (r *rows) write(ctx context.Context, at time.Time, write func(context.Context, io.Writer) error) (int64, error) {
	if err := write(ctx, io.Discard); err != nil {
		return 0, err
	}
	r.made = append(r.made, one{of: at})
	return 1, nil
}

// Of three replicas with one schedule and one bucket the leader writes, once for each time, also when another one leads.
func TestOnlyTheLeaderWrites(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var leader atomic.Pointer[string]
		lead := func(name string) { leader.Store(&name) }
		lead("cp2")
		all := &rows{}
		stores := map[string]*store{}
		for _, name := range []string{"cp1", "cp2", "cp3"} {
			stores[name] = &store{content: "the state"}
			k, err := New(Config{Cluster: "prod", ID: "prod-1a2b", Replica: name, Write: stores[name].write, Log: slog.New(slog.DiscardHandler),
				Options: Options{Schedule: "TZ=UTC 0 * * * *", Keep: 9, S3: S3{URL: "s3://vault", Endpoint: "https://s3.test", Region: "x"}},
				Leads:   func() bool { return *leader.Load() == name }})
			if err != nil {
				t.Fatal(err)
			}
			k.target = all
			ctx, cancel := context.WithCancel(t.Context())
			t.Cleanup(cancel)
			go func() { _ = k.Run(ctx) }()
			t.Cleanup(func() { cancel(); virtual.Wait() })
		}
		said := func() string {
			return fmt.Sprint(stores["cp1"].backups(), stores["cp2"].backups(), stores["cp3"].backups())
		}
		pass(3*time.Hour + time.Minute)
		if have := said(); have != "0 4 0" {
			t.Fatalf("cp2 leads, and they have made %s", have)
		}
		lead("cp3")
		pass(2 * time.Hour)
		if have := said(); have != "0 4 2" {
			t.Fatalf("cp3 leads, and they have made %s", have)
		}
	})
}

// A replica whose name has a '_', as a founder's could have, sees its own backups: what is between names is the last one.
func TestBucketOfAnUnderscore(t *testing.T) {
	s := open(t, nil)
	b := s.bucket(t, "cp_1")
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for i := range 3 {
		if _, err := b.write(t.Context(), at.Add(time.Duration(i)*time.Hour), content("the state")); err != nil {
			t.Fatal(err)
		}
	}
	all, err := s.bucket(t, "cp2").list(t.Context(), at.Add(24*time.Hour))
	if err != nil || len(all) != 3 || !all[0].of.Equal(at) {
		t.Fatalf("another replica sees %v, %v", all, err)
	}
	if removed, err := b.prune(t.Context(), at.Add(24*time.Hour), 1); err != nil || len(removed) != 2 {
		t.Fatalf("removed are %v, %v", removed, err)
	}
}

func TestS3Options(t *testing.T) {
	good := S3{URL: "s3://vault/of/ours", Endpoint: "https://s3.example:9000", Region: "us-east-1"}
	for _, c := range []struct {
		change func(*Options)
		says   string // "" = good
	}{
		{func(o *Options) {}, ""},
		{func(o *Options) { o.S3.URL = "s3://vault" }, ""},
		{func(o *Options) { o.Schedule = "" }, "--backup-s3 says where"},
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

// Without a key that only this replica can read, and with a server of another authority, nothing is sent.
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
		"none":              {func(_ *testing.T, s *S3) { s.Credentials = "" }, "there are none"},
		"missing":           {func(_ *testing.T, s *S3) { s.Credentials += "x" }, "no such file"},
		"another authority": {func(_ *testing.T, s *S3) { s.CA = "" }, "certificate"},
		"no certificate":    {func(_ *testing.T, s *S3) { s.CA = s.Credentials }, "holds no certificate"},
	} {
		t.Run(name, func(t *testing.T) {
			called := false
			s := open(t, func(http.ResponseWriter, *http.Request) bool { called = true; return false })
			c.change(t, &s.s3)
			_, err := s.bucket(t, "cp1").list(t.Context(), time.Now())
			if err == nil || !strings.Contains(err.Error(), c.says) || called {
				t.Errorf("it says %v, want %q; called: %v", err, c.says, called)
			}
			if err != nil && strings.Contains(err.Error(), "hidden") {
				t.Errorf("it tells the key: %v", err)
			}
		})
	}
}
