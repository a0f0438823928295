package controllers_test

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/cronjob"
	"keelson.dev/keelson/controlplane/controllers/daemonset"
	"keelson.dev/keelson/controlplane/controllers/deployment"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/job"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/statefulset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

var rewrite = flag.Bool("rewrite", false, "overwrite the transcripts in testdata with the current output")

// conductor runs one reconcile at a time, and the next when all consequences have arrived. Of the
// waiting reconciles it runs the first by controller and key. In virtual time the order of writes
// is then deterministic.
type conductor struct {
	mu      sync.Mutex
	waiting map[string]chan struct{}
	running bool
}

func (c *conductor) wrap(ctl *engine.Descriptor) {
	lead := ctl.Lead
	ctl.Lead = func(t *engine.Term) engine.Reconcile {
		reconcile := lead(t)
		return func(ctx context.Context, key engine.Key) (time.Duration, error) {
			turn := make(chan struct{})
			c.mu.Lock()
			c.waiting[ctl.Name+" "+key.String()] = turn
			c.mu.Unlock()
			select {
			case <-turn:
			case <-ctx.Done():
				return 0, ctx.Err()
			}
			defer func() {
				c.mu.Lock()
				c.running = false
				c.mu.Unlock()
			}()
			return reconcile(ctx, key)
		}
	}
}

// conduct runs the reconciles in turn until ctx is canceled.
func (c *conductor) conduct(ctx context.Context) {
	for ctx.Err() == nil {
		time.Sleep(100 * time.Millisecond) // of the bubble's own time: passes when nothing else can happen
		c.mu.Lock()
		if !c.running && len(c.waiting) > 0 {
			next := slices.Min(slices.Collect(maps.Keys(c.waiting)))
			close(c.waiting[next])
			delete(c.waiting, next)
			c.running = true
		}
		c.mu.Unlock()
	}
}

// uid is one as a value.
var uid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// scribe records the writes of controllers: user, verb, object and changed fields.
type scribe struct {
	mu    sync.Mutex
	was   map[string]map[string]string // leaves of an object by its key
	lines []string
}

// generated matches the part of a name that the API generates.
var generated = regexp.MustCompile(`-[bcdfghjklmnpqrstvwxz2456789]{5}$`)

func (s *scribe) wrote(r *api.Request, out runtime.Object) {
	if r.Kind.Resource == "events" {
		return
	}
	name := r.Name
	is := map[string]string{}
	if o, ok := out.(api.Object); ok {
		name = o.GetName()
		is = leaves(o)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	key := r.Kind.Resource + "/" + r.Namespace + "/" + name
	changed := []string{}
	was := s.was[key]
	for path, v := range is {
		made := r.Verb == api.VerbCreate && r.Subresource == "" // of a new object the size is sufficient
		if old, had := was[path]; (!had || old != v) && (!made || path == "spec.replicas") {
			changed = append(changed, path+"="+v)
		}
	}
	for path := range was {
		if _, has := is[path]; !has && len(is) > 0 {
			changed = append(changed, path+" gone")
		}
	}
	if len(is) > 0 && r.Subresource != "binding" {
		s.was[key] = is
	}
	if r.User.Name == "admin" {
		return
	}
	slices.Sort(changed)
	verb := string(r.Verb)
	object := r.Kind.Resource + "/" + generated.ReplaceAllString(name, "-*")
	if r.Subresource != "" {
		object += " " + r.Subresource
	}
	who := r.User.Name[strings.LastIndex(r.User.Name, ":")+1:]
	s.lines = append(s.lines, strings.TrimRight(fmt.Sprintf("%-24s %-6s %-38s %s", who, verb, object,
		strings.Join(changed, " ")), " "))
}

// leaves returns the values of an object by path, without values that differ from run to run and
// values that nodes report.
func leaves(o api.Object) map[string]string {
	data, err := json.Marshal(o)
	var tree map[string]any
	if err == nil {
		err = json.Unmarshal(data, &tree)
	}
	if err != nil {
		panic(err)
	}
	out := map[string]string{}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for k, e := range v {
				walk(strings.TrimPrefix(path+"."+k, "."), e)
			}
		case []any:
			if path == "status.conditions" {
				for _, e := range v {
					c := e.(map[string]any)
					out[fmt.Sprintf("status.%v", c["type"])] = fmt.Sprint(cmp.Or(c["status"], any("")))
				}
				return
			}
			for i, e := range v {
				walk(fmt.Sprintf("%s[%d]", path, i), e)
			}
		default:
			out[path] = uid.ReplaceAllString(fmt.Sprint(v), "UID")
		}
	}
	for _, part := range []string{"metadata", "spec", "status"} {
		walk(part, tree[part])
	}
	_, isPod := o.(*corev1.Pod)
	for path := range out {
		drop := isPod && (strings.HasPrefix(path, "spec.") || strings.HasPrefix(path, "status.podIP") ||
			strings.HasSuffix(path, "Time"))
		for _, part := range []string{"uid", "resourceVersion", "creationTimestamp", "managedFields",
			"metadata.generation"} {
			drop = drop || strings.Contains(path, part)
		}
		if drop {
			delete(out, path)
		}
	}
	return out
}

// Every write of one apply of each kind of workload, until nothing moves any more: a write too many shows as a
// difference. Equal lines in a row stand once, with their number.
func TestWritesOfAnApply(t *testing.T) {
	owned := func(o api.Object) api.Object {
		o.SetNamespace("default")
		return o
	}
	rc := &corev1.ReplicationController{ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: corev1.ReplicationControllerSpec{
			Replicas: new(int32), Selector: map[string]string{"app": "web"},
			Template: &testcluster.NewDeployment("web", 1, "web:1").Spec.Template}}
	*rc.Spec.Replicas = 2
	for name, o := range map[string]api.Object{
		"deployment":            testcluster.NewDeployment("web", 2, "web:1"),
		"statefulset":           testcluster.NewStatefulSet("db", 2, "db:1"),
		"daemonset":             testcluster.NewDaemonSet("log", "log:1", nil),
		"job":                   testcluster.NewJob("once", 2, 1, "well"),
		"cronjob":               testcluster.NewCronJob("often", "*/10 * * * *", testcluster.NewJob("", 1, 1, "well")),
		"replicationcontroller": owned(rc),
	} {
		t.Run(name, func(t *testing.T) {
			virtual.Test(t, func(t *testing.T) { transcribe(t, name, o) })
		})
	}
}

func transcribe(t *testing.T, name string, o api.Object) {
	c := &conductor{waiting: map[string]chan struct{}{}}
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true, ChangeController: c.wrap,
		Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{deployment.New(d), replicaset.New(d),
				replicaset.NewForReplicationControllers(d),
				statefulset.New(d), daemonset.New(d), job.New(d), cronjob.New(d)}
		}})
	w.AddNode("w1")
	w.AddNode("w2")
	s := &scribe{was: map[string]map[string]string{}}
	ctx, cancel := context.WithCancel(w.Ctx)
	done := make(chan struct{})
	defer func() { cancel(); <-done }()
	wrote := s.wrote
	w.Calls.OnWritten.Store(&wrote)
	go func() { defer close(done); c.conduct(ctx) }()
	w.Lead(engine.Options{OwnIdentity: true})
	w.CreateObject(o)
	time.Sleep(11 * time.Minute) // a cron job's first run is within
	virtual.Wait()
	var out strings.Builder
	for i := 0; i < len(s.lines); {
		n := 1
		for i+n < len(s.lines) && s.lines[i+n] == s.lines[i] {
			n++
		}
		line := s.lines[i]
		if n > 1 {
			line += fmt.Sprintf("  (%d times)", n)
		}
		out.WriteString(line + "\n")
		i += n
	}
	file := filepath.Join("testdata", "writes", name+".txt")
	if *rewrite {
		if err := os.WriteFile(file, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != string(want) {
		t.Errorf("the writes of an apply have changed (-rewrite where they should have):\n%s\nwant\n%s",
			out.String(), want)
	}
}
