package audit

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

const policyText = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
omitManagedFields: true
rules:
- level: None
  users: [system:kube-scheduler]
  verbs: [watch]
- level: Metadata
  resources: [{group: "", resources: [secrets, "serviceaccounts/token"]}]
- level: RequestResponse
  namespaces: [prod]
  resources: [{group: apps}]
  omitStages: [Panic]
  omitManagedFields: false
- level: None
  nonResourceURLs: ["/metrics*", /version]
- level: Request
  userGroups: [dev]
  resources: [{group: "", resources: ["*/status"]}, {group: "", resources: [pods], resourceNames: [web]}, {group: "", resources: ["nodes/*"]}]
- level: None
  resources: [{group: events.k8s.io, resources: ["*"]}]
- level: Metadata
  namespaces: [""]
`

// The first matching rule decides how a request is recorded, with the semantics of Kubernetes.
func TestPolicy(t *testing.T) {
	p, err := parsePolicy([]byte(policyText))
	if err != nil {
		t.Fatal(err)
	}
	dev := api.User{Name: "ann", Groups: []string{"dev"}}
	for i, c := range []struct {
		a    Attributes
		want Level
	}{
		{Attributes{User: api.User{Name: "system:kube-scheduler"}, Verb: "watch", Resource: "pods"}, LevelNone},
		{Attributes{Verb: "get", Resource: "secrets", Namespace: "prod"}, LevelMetadata},
		{Attributes{Verb: "create", Resource: "serviceaccounts", Subresource: "token", Namespace: "a"}, LevelMetadata},
		{Attributes{Verb: "create", Resource: "serviceaccounts", Namespace: "a"}, LevelNone},
		{Attributes{Verb: "create", Group: "apps", Resource: "deployments", Namespace: "prod"}, LevelRequestResponse},
		{Attributes{Verb: "create", Group: "apps", Resource: "deployments", Namespace: "test"}, LevelNone},
		{Attributes{Verb: "get", Path: "/metrics/slis"}, LevelNone},
		{Attributes{User: dev, Verb: "update", Resource: "pods", Subresource: "status", Namespace: "a"}, LevelRequest},
		{Attributes{User: dev, Verb: "update", Resource: "pods", Name: "web", Namespace: "a"}, LevelRequest},
		{Attributes{User: dev, Verb: "update", Resource: "pods", Name: "db", Namespace: "a"}, LevelNone},
		{Attributes{User: dev, Verb: "create", Resource: "nodes", Subresource: "proxy"}, LevelRequest},
		{Attributes{User: dev, Verb: "create", Resource: "nodes"}, LevelMetadata}, // cluster-scoped
		{Attributes{Verb: "create", Group: "events.k8s.io", Resource: "events"}, LevelNone},
	} {
		if got := p.verdictFor(&c.a).level; got != c.want {
			t.Errorf("%d: %+v is recorded at %s, want %s", i, c.a, got, c.want)
		}
	}
	v := p.verdictFor(&Attributes{Group: "apps", Resource: "deployments", Namespace: "prod"})
	if len(v.omit) != 2 || v.omitManagedFields {
		t.Errorf("%+v", v)
	}
}

func TestPolicyIsChecked(t *testing.T) {
	const head = "apiVersion: audit.k8s.io/v1\nkind: Policy\n"
	for text, want := range map[string]string{
		"kind: Policy\nrules: []": "want a Policy " +
			"of audit.k8s.io/v1",
		head + "rules: [{level: All}]":                "rules[0].level",
		head + "rules: [{level: None, resource: []}]": "unknown field",
		head + "omitStages: [Never]":                  "omitStages[0]",
		head + "rules: [{level: None, nonResourceURLs: " +
			"[/a*b]}]": "rules[0].nonResourceURLs[0]",
		head + "rules: [{level: None, nonResourceURLs: [/a], namespaces: " +
			"[x]}]": "cannot apply to both",
		head + "rules: [{level: None, resources: [{resourceNames: " +
			"[x]}]}]": "at least one resource",
		head + "rules: [{level: None, resources: [{group: apps/v1, resources: [replicasets]}]}]": "without its version",
	} {
		if _, err := parsePolicy([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

// kept is a sink that stores the lines.
type kept struct{ lines [][]byte }

func (k *kept) Put(line []byte) error { k.lines = append(k.lines, line); return nil }

func (k *kept) last(t *testing.T) (e Event) {
	t.Helper()
	if len(k.lines) == 0 {
		t.Fatal("nothing was recorded")
	}
	if err := json.Unmarshal(k.lines[len(k.lines)-1], &e); err != nil {
		t.Fatal(err)
	}
	return e
}

// Without a policy file, writes and rejected requests are recorded without bodies, and nothing
// else.
func TestDefaultPolicy(t *testing.T) {
	k := &kept{}
	a := New(Default(), k, time.Now)
	for _, c := range []struct {
		at   Attributes
		code int
		want int
	}{
		{Attributes{Verb: "create", Resource: "secrets", Changes: true}, 201, 1},
		{Attributes{Verb: "create", Resource: "secrets", Changes: true}, 409, 1},
		{Attributes{Verb: "get", Resource: "secrets"}, 200, 0},
		{Attributes{Verb: "get", Resource: "secrets"}, 403, 1},
		{Attributes{Verb: "get", Path: "/metrics"}, 429, 1},
		{Attributes{Verb: "create", Resource: "pods", Subresource: "exec", Changes: true, Stream: true}, 101, 2},
		{Attributes{Verb: "watch", Resource: "pods", Stream: true}, 200, 0},
	} {
		before := len(k.lines)
		_, r := a.Begin(t.Context(), Origin{URI: "/x", Received: time.Now()})
		if err := r.SetRequest(c.at); err != nil {
			t.Fatal(err)
		}
		r.SetBody(false, &corev1.Secret{Data: map[string][]byte{"canary": []byte("canary")}}, nil)
		r.MarkStarted(c.code)
		r.Finish(c.code, false)
		r.Finish(500, true) // a second call has no effect
		if got := len(k.lines) - before; got != c.want {
			t.Errorf("%+v answered %d: %d records, want %d", c.at, c.code, got, c.want)
		}
	}
	if all := string(bytes.Join(k.lines, nil)); strings.Contains(all, "canary") ||
		!strings.Contains(all, `"level":"Metadata"`) {
		t.Errorf("%s", all)
	}
}

// Client-supplied values are truncated, so that the size of a record is limited.
func TestRecordsAreBounded(t *testing.T) {
	k := &kept{}
	long := strings.Repeat("é", 1<<20)
	groups := make([]string, 10000)
	extra := map[string][]string{}
	for i := range groups {
		groups[i] = long[:1000]
		extra[fmt.Sprint(i)] = groups[:100]
	}
	u := api.User{Name: long, UID: long, Groups: groups, Extra: extra}
	p := Default()
	p.Rules[0].Level = LevelRequestResponse
	_, r := New(p, k, time.Now).Begin(t.Context(), Origin{URI: long, UserAgent: long, ID: long, Source: "192.0.2.1"})
	_ = r.SetRequest(Attributes{User: u, Sender: api.User{Name: long + "2"}, Verb: long, Resource: long, Name: long,
		Namespace: long, Changes: true})
	r.SetStatus(&metav1.Status{Message: long})
	r.Annotate("n", long)
	r.SetBody(false, &corev1.ConfigMap{Data: map[string]string{"a": long}}, nil)
	r.Finish(422, false)
	e := k.last(t)
	if got := len(k.lines[0]); got > 256<<10 || e.Annotations["audit.k8s.io/truncated"] != "true" ||
		e.RequestObject != nil {
		t.Errorf("a record of %d bytes, annotations %d", got, len(e.Annotations))
	}
}

// stuck is a writer that blocks until it is released.
type stuck struct {
	free chan struct{}
	mu   sync.Mutex
	buf  bytes.Buffer
}

func (s *stuck) Write(p []byte) (int, error) {
	<-s.free
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.buf.Write(p)
}

// A blocked disk delays no request and fills no memory. Lost lines are reported in the log.
func TestLogDoesNotBlock(t *testing.T) {
	disk := &stuck{free: make(chan struct{})}
	l := NewLog(disk, false, slog.New(slog.NewTextHandler(io.Discard, nil)))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- l.Run(ctx) }()
	line := append(bytes.Repeat([]byte("x"), 1<<20-1), '\n')
	const put = 60
	for range put {
		if err := l.Put(line); err != nil {
			t.Fatal(err)
		}
	}
	l.mu.Lock()
	queued := len(l.queue)
	l.mu.Unlock()
	if queued > queueBytes {
		t.Errorf("%d bytes wait", queued)
	}
	close(disk.free)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if err := l.Put([]byte("late\n")); err != nil {
		t.Error(err)
	}
	lines, lost := 0, ""
	s := bufio.NewScanner(&disk.buf)
	s.Buffer(nil, 2<<20)
	for s.Scan() {
		if strings.HasPrefix(s.Text(), "{") {
			var e Event
			if err := json.Unmarshal(s.Bytes(), &e); err != nil {
				t.Fatal(err)
			}
			lost = e.Annotations["audit.keelson.dev/lost-records"]
			continue
		}
		lines++
	}
	if want := fmt.Sprint(put + 1 - lines); lost != want || lines < queueBytes>>20 ||
		!strings.HasSuffix(disk.buf.String(), "late\n") && s.Err() != nil {
		t.Errorf("%d lines were written, %s said to be lost, want %s; %v", lines, lost, want, s.Err())
	}
}

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left on device") }

// Put of a strict log returns the error of a failed write.
func TestStrictLog(t *testing.T) {
	p := Default()
	p.Received()
	a := New(p, NewLog(full{}, true, slog.New(slog.NewTextHandler(io.Discard, nil))), time.Now)
	_, r := a.Begin(t.Context(), Origin{})
	if err := r.SetRequest(Attributes{Verb: "create", Resource: "pods", Changes: true}); err == nil {
		t.Error("a record that is lost was not said to be")
	}
	_, r = a.Begin(t.Context(), Origin{})
	if err := r.SetRequest(Attributes{Verb: "get", Resource: "pods"}); err != nil {
		t.Errorf("a read: %v", err)
	}
}

// Unauthenticated clients cannot fill the log: one event represents many rejected requests and
// contains their number. Authenticated clients and other sources have their own events.
func TestStrangersAreCounted(t *testing.T) {
	k := &kept{}
	now := time.Unix(1000, 0)
	a := New(Default(), k, func() time.Time { return now })
	refuse := func(source, user string) {
		_, r := a.Begin(t.Context(), Origin{URI: "/api/v1/nodes", Source: source, Received: now})
		_ = r.SetRequest(Attributes{Sender: api.User{Name: user}, User: api.User{Name: user}, Verb: "list",
			Resource: "nodes"})
		r.Finish(401, false)
	}
	const flood = 100000
	for range flood {
		refuse("192.0.2.1", "")
	}
	if len(k.lines) != sourceBurst {
		t.Errorf("%d refusals at once have %d records", flood, len(k.lines))
	}
	now = now.Add(time.Second)
	refuse("192.0.2.1", api.UserAnonymous)
	if e := k.last(t); e.Annotations["audit.keelson.dev/refusals-before"] != fmt.Sprint(flood-sourceBurst) {
		t.Errorf("%v", e.Annotations)
	}
	before := len(k.lines)
	refuse("192.0.2.2", "")
	for range 500 {
		refuse("192.0.2.1", "alice")
	}
	if got := len(k.lines) - before; got != 501 {
		t.Errorf("another source and a user have %d records of 501", got)
	}
	// The same limit applies to RequestReceived events.
	p := Default()
	p.Received()
	k.lines = nil
	early := New(p, k, func() time.Time { return now })
	for range flood {
		_, r := early.Begin(t.Context(), Origin{URI: "/api/v1/nodes", Source: "192.0.2.1", Received: now})
		_ = r.SetRequest(Attributes{Sender: api.User{Name: api.UserAnonymous}, Verb: "create", Resource: "nodes",
			Changes: true})
		r.Finish(401, false)
	}
	if len(k.lines) != sourceBurst {
		t.Errorf("%d refusals that are recorded as they come as well have %d records", flood, len(k.lines))
	}
	for i := range 5 * maxSources {
		refuse(fmt.Sprint("source ", i), "")
	}
	if n := len(a.unauthenticated.sources); n > maxSources+1 {
		t.Errorf("%d sources are remembered", n)
	}
}

// A request without a record can be annotated: nothing is recorded.
func TestNilRecord(t *testing.T) {
	ctx, r := (*Auditor)(nil).Begin(t.Context(), Origin{})
	r.Annotate("key", "value")
	r.AnnotateContent("key", "value")
	if Of(ctx) != nil || r.WantsBody(false) || r.WantsBody(true) {
		t.Error("a request without an auditor has a record")
	}
}
