package registry

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/objectmeta"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/storeerrors"
	"keelson.dev/keelson/raftstore"
)

// F46: a GET sees every write acknowledged before it. F47 F49: stored bytes are protobuf below
// /registry/{type}/{ns}/{name}.
func TestCreateStoresProtobufUnderTheObjectsKey(t *testing.T) {
	e := newEnv(t)
	made := e.create(configMap("default", "a", "k", "v"))
	if made.GetUID() == "" || made.GetCreationTimestamp() == (metav1.Time{}) || made.GetResourceVersion() == "" {
		t.Fatalf("server-set metadata is missing: %+v", made)
	}
	it, _, err := e.store.Get(e.ctx, "/registry/configmaps/default/a", raftstore.ReadOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.HasPrefix(it.Value, []byte("k8s\x00")) {
		t.Fatalf("stored bytes begin with %q", it.Value[:8])
	}
	if got := storedform.FormatRevision(it.Modified); got != made.GetResourceVersion() {
		t.Fatalf("resourceVersion is %s, the store's revision %s", made.GetResourceVersion(), got)
	}
	read, err := e.get(configMap("default", "a"))
	if err != nil {
		t.Fatal(err)
	}
	if read.GetUID() != made.GetUID() || read.(*corev1.ConfigMap).Data["k"] != "v" {
		t.Fatalf("read back %+v", read)
	}
	_, err = e.tryCreate(configMap("default", "a"))
	refused(t, err, 409, metav1.StatusReasonAlreadyExists)
}

func TestCreateRefusals(t *testing.T) {
	e := newEnv(t)
	withVersion := configMap("default", "a")
	withVersion.ResourceVersion = "7"
	slash := configMap("default", "a/b")
	for name, c := range map[string]struct {
		obj  api.Object
		code int32
	}{
		"resourceVersion set": {withVersion, 400},
		"slash in the name":   {slash, 422},
		"no name":             {configMap("default", ""), 422},
		"no namespace":        {configMap("", "a"), 400},
	} {
		before := e.store.Applied()
		_, err := e.tryCreate(c.obj)
		s, ok := err.(apierrors.APIStatus)
		if !ok || s.Status().Code != c.code {
			t.Errorf("%s: got %v, want code %d", name, err, c.code)
		}
		if e.store.Applied() != before {
			t.Errorf("%s: the store changed", name) // F44
		}
	}
}

func TestGenerateNameRetriesAndGivesUp(t *testing.T) {
	e := newEnv(t)
	draws := []string{"aaaaa", "aaaaa", "bbbbb"}
	e.randomSuffix = func(int) string { s := draws[0]; draws = draws[1:]; return s }
	gen := configMap("default", "")
	gen.GenerateName = "web-"
	first, second := e.create(gen), e.create(gen)
	if first.GetName() != "web-aaaaa" || second.GetName() != "web-bbbbb" {
		t.Fatalf("names %s and %s", first.GetName(), second.GetName())
	}
	e.randomSuffix = func(int) string { return "aaaaa" }
	_, err := e.tryCreate(gen)
	s := refused(t, err, 409, metav1.StatusReasonAlreadyExists)
	if !strings.Contains(s.Message, "was not able to generate a unique name") {
		t.Fatalf("message %q", s.Message)
	}
	if n := objectmeta.GenerateName(strings.Repeat("x", 80), "abcde"); len(n) != 63 {
		t.Fatalf("a generated name has %d characters", len(n))
	}
}

// F124: of two updates of the same version, one gets 409, and no change is lost.
func TestStaleUpdateConflicts(t *testing.T) {
	e := newEnv(t)
	base := e.create(configMap("default", "a", "n", "0")).DeepCopyObject().(*corev1.ConfigMap)
	one, two := base.DeepCopy(), base.DeepCopy()
	one.Data["n"], two.Data["n"] = "1", "2"
	stored := e.update(one, "")
	if stored.GetResourceVersion() == base.ResourceVersion {
		t.Fatal("the update did not move the resourceVersion")
	}
	_, err := e.tryUpdate(two, "")
	s := refused(t, err, 409, metav1.StatusReasonConflict)
	if want := `Operation cannot be fulfilled on configmaps "a": the object has been modified; please apply your ` +
		`changes to the latest version and try again`; s.Message != want {
		t.Fatalf("message %q", s.Message)
	}
	two.ResourceVersion = ""
	if got := e.update(two, "").(*corev1.ConfigMap); got.Data["n"] != "2" {
		t.Fatalf("the unconditional update stored %v", got.Data)
	}
}

// F124: concurrent read-modify-write updates lose no increment.
func TestModifyRetriesConflicts(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a", "n", ""))
	var wg sync.WaitGroup
	const writers, each = 8, 25
	for range writers {
		wg.Go(func() {
			for range each {
				req := e.request(api.VerbUpdate, configMap("default", "a"))
				_, err := e.Modify(e.ctx, req, nil, func(obj api.Object) error {
					obj.(*corev1.ConfigMap).Data["n"] += "x"
					return nil
				})
				if err != nil {
					t.Errorf("modify: %v", err)
				}
			}
		})
	}
	wg.Wait()
	got, err := e.get(configMap("default", "a"))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(got.(*corev1.ConfigMap).Data["n"]); n != writers*each {
		t.Fatalf("%d increments are left of %d", n, writers*each)
	}
}

func TestUpdateOfNothingAndOfTheSame(t *testing.T) {
	e := newEnv(t)
	_, err := e.tryUpdate(configMap("default", "missing"), "")
	refused(t, err, 404, metav1.StatusReasonNotFound)

	made := e.create(configMap("default", "a", "k", "v"))
	before := e.store.Applied()
	same := e.update(configMap("default", "a", "k", "v"), "")
	if same.GetResourceVersion() != made.GetResourceVersion() || e.store.Applied() != before {
		t.Fatalf("an update that changes nothing moved %s to %s", made.GetResourceVersion(), same.GetResourceVersion())
	}
	other := configMap("default", "a", "k", "w")
	other.UID = types.UID("another")
	_, err = e.tryUpdate(other, "")
	refused(t, err, 409, metav1.StatusReasonConflict)
}

func TestStatusAndSpecDoNotTouchEachOther(t *testing.T) {
	e := newEnv(t)
	made := e.create(pod("default", "p")).(*corev1.Pod)
	report := made.DeepCopy()
	report.Status.Phase = corev1.PodRunning
	report.Spec.NodeName = "smuggled"
	got := e.update(report, "status").(*corev1.Pod)
	if got.Status.Phase != corev1.PodRunning || got.Spec.NodeName != "" {
		t.Fatalf("status update stored phase %q node %q", got.Status.Phase, got.Spec.NodeName)
	}
	spec := got.DeepCopy()
	spec.Labels["new"] = "label"
	spec.Status.Phase = corev1.PodFailed
	got = e.update(spec, "").(*corev1.Pod)
	if got.Status.Phase != corev1.PodRunning || got.Labels["new"] != "label" {
		t.Fatalf("update stored phase %q labels %v", got.Status.Phase, got.Labels)
	}
}

func TestDryRunStoresNothing(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "there", "k", "v"))
	before := e.store.Applied()
	dry := []string{metav1.DryRunAll}

	req := e.request(api.VerbCreate, configMap("default", "a"))
	req.Object, req.Create.DryRun = configMap("default", "a"), dry
	if _, err := e.Registry.Create(e.ctx, req, e.admit); err != nil {
		t.Fatal(err)
	}
	req = e.request(api.VerbCreate, configMap("default", "there"))
	req.Object, req.Create.DryRun = configMap("default", "there"), dry
	_, err := e.Registry.Create(e.ctx, req, e.admit)
	refused(t, err, 409, metav1.StatusReasonAlreadyExists)

	req = e.request(api.VerbUpdate, configMap("default", "there"))
	req.Object, req.Update.DryRun = configMap("default", "there", "k", "w"), dry
	out, _, err := e.Registry.Update(e.ctx, req, e.admit)
	if err != nil || out.(*corev1.ConfigMap).Data["k"] != "w" {
		t.Fatalf("dry update: %v %v", out, err)
	}
	if _, gone, err := e.tryDelete(configMap("default", "there"), metav1.DeleteOptions{DryRun: dry}); err != nil ||
		!gone {
		t.Fatalf("dry delete: gone %v, %v", gone, err)
	}
	if e.store.Applied() != before {
		t.Fatal("a dry run changed the store")
	}
}

// Writes of a deposed leader fail with a specific error and have no effect.
func TestFencedWrite(t *testing.T) {
	e := newEnv(t)
	write := func(name string) error {
		req := e.request(api.VerbCreate, configMap("default", name))
		req.Object, req.Internal.Fence = configMap("default", name), 1
		_, err := e.Registry.Create(e.ctx, req, e.admit)
		return err
	}
	if err := write("before"); err != nil {
		t.Fatal(err)
	}
	e.store.Depose()
	err := write("after")
	refused(t, err, 409, storeerrors.ReasonLeadershipEnded)
	if !storeerrors.IsLeadershipEnded(err) {
		t.Fatalf("storeerrors.IsLeadershipEnded(%v) is false", err)
	}
	if _, err := e.get(configMap("default", "after")); !apierrors.IsNotFound(err) {
		t.Fatalf("the fenced write is there: %v", err)
	}
}

func TestTraceAnnotationFollowsDesiredChanges(t *testing.T) {
	e := newEnv(t)
	trace := func(n int) string { return fmt.Sprintf("00-%032x-%016x-01", n, n) }
	req := e.request(api.VerbCreate, configMap("default", "a"))
	req.Object, req.Client.TraceParent = configMap("default", "a", "k", "1"), trace(1)
	if _, err := e.Registry.Create(e.ctx, req, e.admit); err != nil {
		t.Fatal(err)
	}
	put := func(n int, cm *corev1.ConfigMap) string {
		req := e.request(api.VerbUpdate, cm)
		req.Object, req.Client.TraceParent = cm, trace(n)
		out, _, err := e.Registry.Update(e.ctx, req, e.admit)
		if err != nil {
			t.Fatal(err)
		}
		return out.(api.Object).GetAnnotations()[api.TraceParentAnnotation]
	}
	before := e.store.Applied()
	if got := put(2, configMap("default", "a", "k", "1")); got != trace(1) || e.store.Applied() != before {
		t.Fatalf("an unchanged apply moved the trace to %q", got)
	}
	if got := put(3, configMap("default", "a", "k", "2")); got != trace(3) {
		t.Fatalf("a changed apply left the trace at %q", got)
	}
}

func TestOversizedObject(t *testing.T) {
	e := newEnv(t)
	_, err := e.tryCreate(configMap("default", "big", "k", strings.Repeat("x", raftstore.MaxValueBytes)))
	s, ok := err.(apierrors.APIStatus)
	if !ok || (s.Status().Code != 413 && s.Status().Code != 422) {
		t.Fatalf("got %v", err)
	}
}

// slowStore delays commits and drops the responses of selected ones.
type slowStore struct {
	raftstore.Store
	lose atomic.Bool
}

func (s *slowStore) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	rev, err := s.Store.Commit(ctx, c)
	if err == nil && s.lose.Load() {
		return 0, fmt.Errorf("commit: %w", raftstore.ErrOutcomeUnknown)
	}
	return rev, err
}

// A write with an unknown result is not repeated.
func TestUnknownOutcomeIsNotRetried(t *testing.T) {
	mem := newEnv(t).store
	s := &slowStore{Store: mem}
	e := startEnv(t, mem, s)
	e.create(configMap("default", "a", "n", ""))
	s.lose.Store(true)
	req := e.request(api.VerbUpdate, configMap("default", "a"))
	_, err := e.Modify(e.ctx, req, nil, func(obj api.Object) error {
		obj.(*corev1.ConfigMap).Data["n"] += "x"
		return nil
	})
	refused(t, err, 504, metav1.StatusReasonTimeout)
	got, err := e.get(configMap("default", "a"))
	if err != nil {
		t.Fatal(err)
	}
	if n := got.(*corev1.ConfigMap).Data["n"]; n != "x" {
		t.Fatalf("the write was made %d times", len(n))
	}
}

func TestCallsEndAtTheirDeadline(t *testing.T) {
	e := newEnv(t)
	e.store.Close()
	ctx, cancel := context.WithTimeout(e.ctx, 50*time.Millisecond)
	defer cancel()
	req := e.request(api.VerbGet, configMap("default", "a"))
	_, err := e.Registry.GetObject(ctx, req)
	refused(t, err, 503, metav1.StatusReasonServiceUnavailable)
}
