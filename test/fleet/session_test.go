package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// F55, F93: an agent enrols with a token, registers its node, and receives its own pods and exactly what they reference.
func TestAssignment(t *testing.T) {
	b := newBed(t, "cp1")
	b.create(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wanted"}, Data: map[string]string{"k": "1"}})
	b.create(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "other"}})
	b.create(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pull"}})
	early := b.pod("early", "w1", func(p *v1.Pod) { p.Spec.ImagePullSecrets = []v1.LocalObjectReference{{Name: "pull"}} })
	b.pod("foreign", "w2", nil)

	n := b.join("w1", nil)
	n.awaitPod(b, early.UID)
	b.awaitReady("w1", v1.ConditionTrue)
	if got := n.Cluster(); got.Name != "test" || got.Domain != "cluster.local" {
		t.Errorf("cluster facts: %+v", got)
	}
	if _, ok := n.Secret("default", "pull"); !ok {
		t.Error("the pull secret of the pod is missing")
	}
	changes := n.Changes(b.ctx)
	<-changes // everything, at once
	began := time.Now()
	late := b.pod("late", "w1", func(p *v1.Pod) {
		p.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "wanted"}}}}}
	})
	for kinds := range changes {
		if _, ok := kinds["Pod"]; ok {
			break
		}
	}
	took := time.Since(began)
	t.Logf("create to seen by the agent: %s", took)
	if took > 50*time.Millisecond {
		t.Errorf("a bound pod took %s to reach its agent, want 50 ms at most", took)
	}
	if _, ok := n.Pod(late.UID); !ok {
		t.Fatal("the agent was told of a change but does not have the pod")
	}
	if cm, ok := n.ConfigMap("default", "wanted"); !ok || cm.Data["k"] != "1" {
		t.Errorf("referenced ConfigMap: %v", cm)
	}
	if _, ok := n.ConfigMap("default", "other"); ok {
		t.Error("the agent holds a ConfigMap that no pod of its references")
	}
	if got := len(n.Pods()); got != 2 {
		t.Errorf("the agent holds %d pods, want its own 2", got)
	}
	if _, err := client.Patch[*v1.ConfigMap](b.ctx, b.client, "default", "wanted", "", types.MergePatchType, []byte(`{"data":{"k":"2"}}`)); err != nil {
		t.Fatal(err)
	}
	b.eventually("changed ConfigMap", func() error {
		if cm, _ := n.ConfigMap("default", "wanted"); cm == nil || cm.Data["k"] != "2" {
			return errors.New("still the old one")
		}
		return nil
	})
	zero := int64(0)
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "late", metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	b.eventually("pod and what it alone referenced", func() error {
		if _, ok := n.Pod(late.UID); ok {
			return errors.New("the pod is still there")
		}
		if _, ok := n.ConfigMap("default", "wanted"); ok {
			return errors.New("the ConfigMap is still there")
		}
		return nil
	})
}

func podIs(b *bed, name string, phase v1.PodPhase) func() error {
	return func() error {
		p, err := client.Get[*v1.Pod](b.ctx, b.client, "default", name)
		if err != nil {
			return err
		}
		if p.Status.Phase != phase {
			return fmt.Errorf("phase is %q, want %q", p.Status.Phase, phase)
		}
		return nil
	}
}

func report(p *v1.Pod, phase v1.PodPhase, message string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID}, Status: v1.PodStatus{Phase: phase, Message: message}}
}

// The newest status per pod wins and conditions of others are kept; a status for a pod of another uid is ignored; a pod that is gone goes.
func TestStatus(t *testing.T) {
	b := newBed(t, "cp1")
	n := b.join("w1", nil)
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	before := b.writes.Load()
	for i := range 200 {
		n.PodStatus(report(p, v1.PodPending, fmt.Sprint("step ", i)))
	}
	n.PodStatus(report(p, v1.PodRunning, "last"))
	b.eventually("status", podIs(b, "p", v1.PodRunning))
	if wrote := b.writes.Load() - before; wrote > 100 {
		t.Errorf("200 statuses in a row made %d writes: they must coalesce", wrote)
	}
	writes := b.writes.Load()
	n.PodStatus(report(p, v1.PodRunning, "last"))
	stale := report(p, v1.PodFailed, "of another life")
	stale.UID = "other"
	n.PodStatus(stale)
	q := b.pod("q", "w1", nil) // its status shows that the ones before have been dealt with
	n.PodStatus(report(q, v1.PodRunning, ""))
	b.eventually("status of the next pod", podIs(b, "q", v1.PodRunning))
	b.eventually("first pod unchanged", podIs(b, "p", v1.PodRunning))
	if wrote := b.writes.Load() - writes; wrote != 2 {
		t.Errorf("an unchanged and a stale status, a pod and its status made %d writes, want 2", wrote)
	}
	n.PodStatus(report(p, v1.PodSucceeded, ""))
	n.PodGone("default", "p", p.UID)
	b.eventually("gone", func() error {
		if _, err := client.Get[*v1.Pod](b.ctx, b.client, "default", "p"); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the pod is still there (%v)", err)
		}
		return nil
	})
}

// P5: the session moves at once when its replica ends; the node is never lost, and what was to be reported arrives.
func TestFailover(t *testing.T) {
	b := newBed(t, "cp1", "cp2", "cp3")
	n := b.join("w1", nil)
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	for round := range 2 {
		old := b.holder("w1")
		b.kill(old.name)
		began := time.Now()
		n.PodStatus(report(p, v1.PodRunning, fmt.Sprint("round ", round)))
		b.eventually("session elsewhere", func() error {
			if h := b.holder("w1"); h == nil {
				return errors.New("no session")
			}
			return nil
		})
		took := time.Since(began)
		t.Logf("moved within %s", took)
		if took > time.Second {
			t.Errorf("fail-over took %s, want at most 1 s", took)
		}
		b.eventually("status after fail-over", func() error {
			p, err := client.Get[*v1.Pod](b.ctx, b.client, "default", "p")
			if err != nil {
				return err
			}
			if want := fmt.Sprint("round ", round); p.Status.Message != want {
				return fmt.Errorf("message %q, want %q", p.Status.Message, want)
			}
			return nil
		})
		if got := b.ready("w1"); got != v1.ConditionTrue {
			t.Errorf("the node was lost in the fail-over: Ready=%s", got)
		}
	}
	later := b.pod("later", "w1", nil)
	n.awaitPod(b, later.UID)
}

// P17: a replica that neither answers nor closes is left as well.
func TestSilentReplica(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	old := b.holder("w1")
	b.wire.lose(old.address)
	b.eventually("session elsewhere", func() error {
		for _, r := range b.replicas {
			if r != old && r.fleet.Connected("w1") {
				return nil
			}
		}
		return errors.New("no session with the other replica")
	})
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	b.wire.heal(old.address)
	b.eventually("old session given up", func() error {
		if old.fleet.Connected("w1") {
			return errors.New("the silent session is still held")
		}
		return nil
	})
	if got := b.ready("w1"); got != v1.ConditionTrue {
		t.Errorf("Ready=%s although a session lived all the time", got)
	}
}

// P4: a node without session is Ready=Unknown after the grace, and Ready again once it is back.
func TestLostAndFound(t *testing.T) {
	b := newBed(t, "cp1")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	b.awaitReady("w1", v1.ConditionUnknown)
	if took := time.Since(began); took < grace/2 {
		t.Errorf("lost after %s, within the grace", took)
	}
	b.rejoin(n, nil, b.addresses())
	b.awaitReady("w1", v1.ConditionTrue)
}

// P6: nodes of a dead replica that come back elsewhere are kept; the one that does not is written lost by the leader, also by a
// leader that was elected afterwards.
func TestReplicaDies(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	kept, lost := b.join("kept", nil), b.join("lost", nil)
	b.awaitReady("kept", v1.ConditionTrue)
	b.awaitReady("lost", v1.ConditionTrue)
	// Both on one replica: whoever is elsewhere is made to move.
	holder := b.holder("lost")
	survivor := b.replicas["cp1"]
	if holder == survivor {
		survivor = b.replicas["cp2"]
	}
	if err := lost.stop(); err != nil { // it dies together with its replica
		t.Fatal(err)
	}
	b.kill(holder.name)
	for range 2 {
		lead, depose := context.WithTimeout(b.ctx, grace/2) // too short a leadership to lose anybody
		if err := survivor.fleet.RunLeader(lead, b.client); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("RunLeader: %v", err)
		}
		depose()
		if got := b.ready("lost"); got != v1.ConditionTrue {
			t.Fatalf("a leader wrote the node lost within the grace: %s", got)
		}
	}
	lead, depose := context.WithCancel(b.ctx)
	ended := make(chan error, 1)
	go func() { ended <- survivor.fleet.RunLeader(lead, b.client) }()
	b.awaitReady("lost", v1.ConditionUnknown)
	if got := b.ready("kept"); got != v1.ConditionTrue {
		t.Errorf("the node that moved is Ready=%s", got)
	}
	depose()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("RunLeader: %v", err)
	}
	_ = kept
}

// With no control plane at all the agent works from its checkpoint, in which Secrets are in the run folder alone.
func TestCheckpoint(t *testing.T) {
	b := newBed(t, "cp1")
	b.create(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"}, Data: map[string][]byte{"k": []byte("very-secret-value")}})
	n := b.join("w1", nil)
	p := b.pod("p", "w1", func(p *v1.Pod) {
		p.Spec.ServiceAccountName = "default"
		p.Spec.Volumes = []v1.Volume{{Name: "v", VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s"}}}}
	})
	held := n.awaitPod(b, p.UID)
	tok, _, err := n.Token(b.ctx, held, "", 3600)
	if err != nil || !strings.Contains(tok, "by-system:node:w1") {
		t.Fatalf("token %q, %v", tok, err)
	}
	if again, _, err := n.Token(b.ctx, held, "", 3600); err != nil || again != tok || b.tokens.Load() != 1 {
		t.Errorf("a token within 80%% of its life was asked for again: %q, %v", again, err)
	}
	b.eventually("checkpoint", func() error {
		data, err := os.ReadFile(filepath.Join(n.state, "assignment.checkpoint"))
		if err != nil {
			return err
		}
		if !strings.Contains(string(data), string(p.UID)) {
			return errors.New("without the pod")
		}
		return nil
	})
	if err := n.stop(); err != nil {
		t.Fatal(err)
	}
	b.kill("cp1")
	err = filepath.WalkDir(n.state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v", path, info.Mode())
		}
		data, err := os.ReadFile(path)
		if strings.Contains(string(data), "very-secret-value") || strings.Contains(string(data), tok) {
			t.Errorf("%s holds a secret outside of the run folder", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	b.rejoin(n, nil, []string{"127.0.0.1:1"})
	select {
	case <-n.Synced():
	case <-time.After(patience):
		t.Fatal("no checkpoint was loaded")
	}
	held, ok := n.Pod(p.UID)
	if !ok {
		t.Fatal("the pod is not in the checkpoint")
	}
	if s, ok := n.Secret("default", "s"); !ok || string(s.Data["k"]) != "very-secret-value" {
		t.Errorf("secret after restart: %v", s)
	}
	if again, _, err := n.Token(b.ctx, held, "", 3600); err != nil || again != tok {
		t.Errorf("token after restart: %q, %v", again, err)
	}
}

// P16: the certificate is renewed at two thirds of its life while the session goes on.
func TestCertificateRenewal(t *testing.T) {
	b := newBed(t, "cp1")
	// Certificates begin five minutes in the past: two thirds of this life end in half a second.
	b.certLife.Store(int64(5*time.Minute/2 + 750*time.Millisecond))
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.eventually("renewal", func() error {
		now, err := os.ReadFile(filepath.Join(n.state, "node.pem"))
		if err != nil {
			return err
		}
		cert, err := pki.DecodeCert(now)
		if err != nil {
			return err
		}
		if time.Until(cert.NotAfter) < time.Hour {
			return errors.New("still the first certificate")
		}
		return nil
	})
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
}

// A refused token ends the agent with a clear error instead of a loop.
func TestBadToken(t *testing.T) {
	b := newBed(t, "cp1")
	f := strings.Split(b.token, ".")
	f[3] = strings.Repeat("0", len(f[3]))
	good := b.token
	b.token = strings.Join(f, ".")
	n := b.join("w1", nil)
	n.mayFail = true
	select {
	case <-n.ended:
	case <-time.After(patience):
		t.Fatal("a refused token did not end the session")
	}
	if n.err == nil || !strings.Contains(n.err.Error(), "w1 cannot join") {
		t.Errorf("the session ended with %v", n.err)
	}
	f = strings.Split(good, ".")
	f[4] = strings.Repeat("0", 64) // another cluster's CA
	b.token = strings.Join(f, ".")
	b.wire.dials = 0
	m := b.join("w2", nil)
	b.eventually("attempts to join", func() error {
		b.wire.mu.Lock()
		defer b.wire.mu.Unlock()
		if b.wire.dials < 3 {
			return errors.New("too few")
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(m.state, "node.pem")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the agent trusted a server of another CA (%v)", err)
	}
}

// Events count up instead of multiplying; stage times arrive on the replica's clock.
func TestEventsAndStages(t *testing.T) {
	b := newBed(t, "cp1")
	n := b.join("w1", nil)
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	for range 5 {
		n.Event(&v1.Event{
			ObjectMeta:     metav1.ObjectMeta{Namespace: "default"},
			InvolvedObject: v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: p.UID},
			Type:           v1.EventTypeWarning, Reason: "BackOff", Message: "again",
		})
	}
	b.eventually("event", func() error {
		list, err := client.List[*v1.Event](b.ctx, b.client, "default", metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list) != 1 || list[0].Count != 5 {
			return fmt.Errorf("%d events, the first counts %d", len(list), append(list, &v1.Event{})[0].Count)
		}
		return nil
	})
	const trace = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
	began := time.Now()
	n.Stages(trace, "pod/default/p", []agent.StageTime{{Name: "sandbox", Start: began, Duration: time.Millisecond}})
	b.eventually("stage", func() error {
		got := b.replicas["cp1"].timeline.Find(api.TraceID(trace))
		if len(got) != 1 {
			return fmt.Errorf("%d stages", len(got))
		}
		if off := got[0].Start.Sub(began).Abs(); off > 20*time.Millisecond || got[0].Actor != "agent/w1" {
			t.Errorf("stage %+v is %s off", got[0], off)
		}
		return nil
	})
}

// P20: a terminating pod behind a Service may be stopped once every node's proxy has applied its removal, and not before.
func TestStopGate(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	w1, w2 := b.join("w1", nil), b.join("w2", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitReady("w2", v1.ConditionTrue)
	p := b.pod("p", "w1", nil)
	alone := b.pod("alone", "w1", nil)
	yes, no := true, false
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "svc-1", Labels: map[string]string{discoveryv1.LabelServiceName: "svc"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints: []discoveryv1.Endpoint{{
			Addresses: []string{"10.0.1.2"}, Conditions: discoveryv1.EndpointConditions{Ready: &yes},
			TargetRef: &v1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "p", UID: p.UID},
		}},
	}
	slice, err := client.Create(b.ctx, b.client, slice)
	if err != nil {
		t.Fatal(err)
	}
	proxy := func(n *node) { n.ProxyApplied(n.Revision()) }
	seen := func(n *node, ready bool) {
		b.eventually("slice on "+n.name, func() error {
			for _, s := range n.EndpointSlices() {
				if *s.Endpoints[0].Conditions.Ready == ready {
					return nil
				}
			}
			return errors.New("not there")
		})
	}
	seen(w1, true)
	seen(w2, true)
	proxy(w1)
	proxy(w2)
	n := int64(30)
	for _, name := range []string{"p", "alone"} {
		if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", name, metav1.DeleteOptions{GracePeriodSeconds: &n}); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	select {
	case <-w1.StopGate(alone.UID):
		t.Logf("a pod in no slice: gate after %s", time.Since(began))
	case <-time.After(900 * time.Millisecond):
		t.Error("a pod in no slice was not let go at once")
	}
	slice = slice.DeepCopy()
	slice.Endpoints[0].Conditions.Ready = &no
	if _, err := client.Update(b.ctx, b.client, slice); err != nil {
		t.Fatal(err)
	}
	seen(w1, false)
	seen(w2, false)
	proxy(w1)
	select {
	case <-w1.StopGate(p.UID):
		if time.Since(began) < 900*time.Millisecond {
			t.Error("the gate opened though a proxy may still route to the pod")
		}
	case <-time.After(100 * time.Millisecond):
	}
	b.eventually("revision on w2", func() error { proxy(w2); return nil })
	select {
	case <-w1.StopGate(p.UID):
		t.Logf("gate opened %s after the deletion", time.Since(began))
	case <-time.After(patience):
		t.Error("the gate stayed closed")
	}
	// A proxy that never answers cannot hold a pod for ever.
	q := b.pod("q", "w1", nil)
	slice = slice.DeepCopy()
	slice.Name, slice.ResourceVersion, slice.UID = "svc-2", "", ""
	slice.Endpoints[0].Conditions.Ready, slice.Endpoints[0].TargetRef.UID = &yes, q.UID
	if _, err := client.Create(b.ctx, b.client, slice); err != nil {
		t.Fatal(err)
	}
	b.eventually("second slice on w1", func() error {
		if len(w1.EndpointSlices()) != 2 {
			return errors.New("not there")
		}
		return nil
	})
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "q", metav1.DeleteOptions{GracePeriodSeconds: &n}); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	select {
	case <-w1.StopGate(q.UID):
		if took := time.Since(began); took < 800*time.Millisecond || took > 3*time.Second {
			t.Errorf("the bound of 1 s took %s", took)
		}
	case <-time.After(patience):
		t.Error("the gate has no bound")
	}
}

// An idle cluster writes nothing: heartbeats stay in memory.
func TestIdleWritesNothing(t *testing.T) {
	b := newBed(t, "cp1", "cp2")
	n := b.join("w1", nil)
	p := b.pod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	n.PodStatus(report(p, v1.PodRunning, ""))
	b.eventually("status", podIs(b, "p", v1.PodRunning))
	b.awaitReady("w1", v1.ConditionTrue)
	before := b.writes.Load()
	ctx, cancel := context.WithTimeout(b.ctx, 10*heartbeat)
	defer cancel()
	<-ctx.Done() // the measured time itself
	if wrote := b.writes.Load() - before; wrote != 0 {
		t.Errorf("ten heartbeats of an idle node made %d writes", wrote)
	}
	if !slices.Contains([]v1.ConditionStatus{v1.ConditionTrue}, b.ready("w1")) {
		t.Error("the node was lost while idle")
	}
}
