package nodegateway_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// F55, F93: an agent enrolls with a token, registers its node, and receives its pods and exactly
// the objects that they reference.
func TestAssignment(t *testing.T) {
	b := newTestEnv(t, "cp1")
	b.createObject(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wanted"},
		Data: map[string]string{"k": "1"}})
	b.createObject(&v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "other"}})
	b.createObject(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pull"}})
	early := b.createPod("early", "w1", func(p *v1.Pod) {
		p.Spec.ImagePullSecrets = []v1.LocalObjectReference{{Name: "pull"}}
	})
	b.createPod("foreign", "w2", nil)

	n := b.startAgent("w1", nil)
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
	late := b.createPod("late", "w1", func(p *v1.Pod) {
		p.Spec.Volumes = []v1.Volume{{Name: "v",
			VolumeSource: v1.VolumeSource{
				ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "wanted"}}}}}
	})
	for kinds := range changes {
		if _, ok := kinds["Pod"]; ok {
			break
		}
	}
	t.Logf("create to seen by the agent: %s", time.Since(began))
	if _, ok := n.Pod(late.UID); !ok {
		t.Fatal("the agent received a change but does not have the pod")
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
	if _, err := client.Patch[*v1.ConfigMap](b.ctx, b.client, "default", "wanted", "", types.MergePatchType,
		[]byte(`{"data":{"k":"2"}}`)); err != nil {
		t.Fatal(err)
	}
	b.awaitCondition("changed ConfigMap", func() error {
		if cm, _ := n.ConfigMap("default", "wanted"); cm == nil || cm.Data["k"] != "2" {
			return errors.New("still the old one")
		}
		return nil
	})
	zero := int64(0)
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "late",
		metav1.DeleteOptions{GracePeriodSeconds: &zero}); err != nil {
		t.Fatal(err)
	}
	b.awaitCondition("pod and what it alone referenced", func() error {
		if _, ok := n.Pod(late.UID); ok {
			return errors.New("the pod is still there")
		}
		if _, ok := n.ConfigMap("default", "wanted"); ok {
			return errors.New("the ConfigMap is still there")
		}
		return nil
	})
}

func podHasPhase(b *testEnv, name string, phase v1.PodPhase) func() error {
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

func podStatus(p *v1.Pod, phase v1.PodPhase, message string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID},
		Status: v1.PodStatus{Phase: phase, Message: message}}
}

// The newest status per pod wins and conditions of others are kept; a status for a pod of another uid is ignored; a pod that is gone goes.
func TestStatus(t *testing.T) {
	b := newTestEnvWith(t, steady, "cp1") // the start of a new session is written
	n := b.startAgent("w1", nil)
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitLeaseOwned("w1")
	before := b.writes.Load()
	for i := range 200 {
		n.PodStatus(podStatus(p, v1.PodPending, fmt.Sprint("step ", i)))
	}
	n.PodStatus(podStatus(p, v1.PodRunning, "last"))
	b.awaitCondition("status", podHasPhase(b, "p", v1.PodRunning))
	if wrote := b.writes.Load() - before; wrote > 100 {
		t.Errorf("200 statuses in a row made %d writes: they must coalesce", wrote)
	}
	writes := b.writes.Load()
	n.PodStatus(podStatus(p, v1.PodRunning, "last"))
	stale := podStatus(p, v1.PodFailed, "of another life")
	stale.UID = "other"
	n.PodStatus(stale)
	q := b.createPod("q", "w1", nil) // its status shows that the ones before have been dealt with
	n.PodStatus(podStatus(q, v1.PodRunning, ""))
	b.awaitCondition("status of the next pod", podHasPhase(b, "q", v1.PodRunning))
	b.awaitCondition("first pod unchanged", podHasPhase(b, "p", v1.PodRunning))
	if wrote := b.writes.Load() - writes; wrote != 2 {
		t.Errorf("an unchanged and a stale status, a pod and its status made %d writes, want 2", wrote)
	}
	n.PodStatus(podStatus(p, v1.PodSucceeded, ""))
	n.PodGone("default", "p", p.UID)
	b.awaitCondition("gone", func() error {
		if _, err := client.Get[*v1.Pod](b.ctx, b.client, "default", "p"); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the pod is still there (%v)", err)
		}
		return nil
	})
}

// P5: the session moves at once when its replica exits; the node is never lost, and pending reports
// arrive.
func TestFailover(t *testing.T) {
	// No clock moves a session or loses a node here: it moves because its replica has ended.
	b := newTestEnvWith(t, steady, "cp1", "cp2", "cp3")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue) // its Node may be made after it has its pods
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	for round := range 2 {
		old := b.awaitSession("w1")
		b.stopReplica(old.name)
		began := time.Now()
		n.PodStatus(podStatus(p, v1.PodRunning, fmt.Sprint("round ", round)))
		b.awaitSession("w1")
		t.Logf("moved within %s", time.Since(began))
		b.awaitCondition("status after fail-over", func() error {
			p, err := client.Get[*v1.Pod](b.ctx, b.client, "default", "p")
			if err != nil {
				return err
			}
			if want := fmt.Sprint("round ", round); p.Status.Message != want {
				return fmt.Errorf("message %q, want %q", p.Status.Message, want)
			}
			return nil
		})
		if got := b.readyStatus("w1"); got != v1.ConditionTrue {
			t.Errorf("the node was lost in the fail-over: Ready=%s", got)
		}
	}
	later := b.createPod("later", "w1", nil)
	n.awaitPod(b, later.UID)
}

// P17: a replica that neither answers nor closes is left as well.
func TestSilentReplica(t *testing.T) {
	// a busy machine takes its time to move it
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: suspect, grace: 20 * time.Second}, "cp1", "cp2")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	old := b.awaitSession("w1")
	b.network.cutAddress(old.address)
	b.awaitCondition("session elsewhere", func() error {
		for _, r := range b.replicas {
			if r != old && r.fleet.HasSession("w1") {
				return nil
			}
		}
		return errors.New("no session with the other replica")
	})
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
	b.network.healAddress(old.address)
	b.awaitCondition("old session ended", func() error {
		if old.fleet.HasSession("w1") {
			return errors.New("the silent session is still held")
		}
		return nil
	})
	if got := b.readyStatus("w1"); got != v1.ConditionTrue {
		t.Errorf("Ready=%s although a session lived all the time", got)
	}
}

// P4: a node without session is Ready=Unknown after the grace, and Ready again once it is back.
func TestLostAndFound(t *testing.T) {
	b := newTestEnv(t, "cp1")
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	var heard time.Time
	b.awaitCondition("a heartbeat", func() error {
		if heard = b.awaitSession("w1").fleet.LastHeartbeats()["w1"]; heard.IsZero() {
			return errors.New("none yet")
		}
		return nil
	})
	if err := n.stop(); err != nil { // which may take as long as the grace
		t.Fatal(err)
	}
	b.awaitReady("w1", v1.ConditionUnknown)
	if took := time.Since(heard); took < grace {
		t.Errorf("lost %s after its last heartbeat, within the grace period", took)
	}
	b.restartAgent(n, nil, b.replicaAddresses())
	b.awaitReady("w1", v1.ConditionTrue)
}

// F117: a node that announces load balancer addresses is suspected after two heartbeats of silence,
// long before it is lost, and not suspected once it responds. A node that announces nothing is not
// suspected.
func TestQuietAnnouncerIsSuspected(t *testing.T) {
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: suspect, grace: 5 * time.Second}, "cp1")
	b.createObject(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web",
		Annotations: map[string]string{balancer.AnnouncedBy: "w1"}},
		Spec: v1.ServiceSpec{Type: v1.ServiceTypeLoadBalancer, Ports: []v1.ServicePort{{Port: 80}}}})
	nodes := map[string]*node{"w1": b.startAgent("w1", nil), "w2": b.startAgent("w2", nil)}
	suspected := func(node string, want bool) func() error {
		return func() error {
			l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
			if err == nil && (l.Annotations[balancer.MissingSince] != "") != want {
				err = fmt.Errorf("%s: suspected: %v", node, !want)
			}
			return err
		}
	}
	for name := range nodes {
		b.awaitReady(name, v1.ConditionTrue)
	}
	for _, n := range nodes {
		if err := n.stop(); err != nil {
			t.Fatal(err)
		}
	}
	b.awaitCondition("w1 is suspected", suspected("w1", true))
	if since, lost := b.suspectedSince("w1"), b.lostAt("w1"); !lost.IsZero() && lost.Before(since) {
		// it may be lost by now
		t.Errorf("it was lost at %s, before it was suspected at %s", lost, since)
	}
	b.awaitReady("w2", v1.ConditionUnknown)
	if err := suspected("w2", false)(); err != nil {
		t.Error(err)
	}
	b.restartAgent(nodes["w1"], nil, b.replicaAddresses())
	b.awaitCondition("w1 is heard again", suspected("w1", false))
}

// suspectedSince returns the time since which a node does not respond.
func (b *testEnv) suspectedSince(node string) time.Time {
	b.t.Helper()
	l, err := client.Get[*coordinationv1.Lease](b.ctx, b.client, v1.NamespaceNodeLease, node)
	if err != nil {
		b.t.Fatal(err)
	}
	since, err := time.Parse(time.RFC3339, l.Annotations[balancer.MissingSince])
	if err != nil {
		b.t.Fatal(err)
	}
	return since
}

// lostAt returns the time at which a node was declared lost, or the zero time.
func (b *testEnv) lostAt(node string) (at time.Time) {
	b.t.Helper()
	n, err := client.Get[*v1.Node](b.ctx, b.client, "", node)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, c := range n.Status.Conditions {
		if c.Type == v1.NodeReady && c.Status != v1.ConditionTrue {
			at = c.LastTransitionTime.Truncate(time.Second)
		}
	}
	return at
}

// P6: nodes of a dead replica that reconnect elsewhere are kept; a node that does not is declared
// lost by the leader, also by a leader elected later.
func TestReplicaDies(t *testing.T) {
	const grace = 4 * time.Second // in which the one moves, also on a busy machine
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: suspect, grace: grace}, "cp1", "cp2")
	kept, lost := b.startAgent("kept", nil), b.startAgent("lost", nil)
	b.awaitReady("kept", v1.ConditionTrue)
	b.awaitReady("lost", v1.ConditionTrue)
	// Both on one replica: whoever is elsewhere is made to move.
	holder := b.awaitSession("lost")
	survivor := b.replicas["cp1"]
	if holder == survivor {
		survivor = b.replicas["cp2"]
	}
	if err := lost.stop(); err != nil { // it dies together with its replica
		t.Fatal(err)
	}
	b.stopReplica(holder.name)
	for range 2 {
		lead, depose := context.WithTimeout(b.ctx, grace/8) // a leadership too short to declare a node lost
		if err := survivor.fleet.RunLeader(lead, b.client); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("RunLeader: %v", err)
		}
		depose()
		if got := b.readyStatus("lost"); got != v1.ConditionTrue {
			t.Fatalf("a leader wrote the node lost within the grace: %s", got)
		}
	}
	lead, depose := context.WithCancel(b.ctx)
	ended := make(chan error, 1)
	go func() { ended <- survivor.fleet.RunLeader(lead, b.client) }()
	b.awaitReady("lost", v1.ConditionUnknown)
	if got := b.readyStatus("kept"); got != v1.ConditionTrue {
		t.Errorf("the node that moved is Ready=%s", got)
	}
	depose()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("RunLeader: %v", err)
	}
	_ = kept
}

// A replica dies and the others are slow to take its sessions over: a node that is connected to them is not called lost
// while its session is on its way.
func TestSlowMoveLosesNoNode(t *testing.T) {
	const grace = 2 * time.Second
	b := newTestEnvWith(t, timeouts{heartbeat: heartbeat, suspect: time.Minute, grace: grace}, "cp1", "cp2")
	b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	holder, survivor := b.awaitSession("w1"), b.replicas["cp2"]
	if holder.name == "cp2" {
		survivor = b.replicas["cp1"]
	}
	b.awaitCondition("the second connection", func() error {
		if !survivor.fleet.HasStandby("w1") {
			return errors.New("it does not stand")
		}
		return nil
	})
	b.failLeases.Store(true)
	b.stopReplica(holder.name)
	lead, depose := context.WithTimeout(b.ctx, grace+grace/2)
	defer depose()
	if err := survivor.fleet.RunLeader(lead, b.client); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("RunLeader: %v", err)
	}
	if got := b.readyStatus("w1"); got != v1.ConditionTrue {
		t.Errorf("the node is Ready=%s while it reconnects", got)
	}
	lead, depose = context.WithCancel(b.ctx)
	defer depose()
	ended := make(chan error, 1)
	go func() { ended <- survivor.fleet.RunLeader(lead, b.client) }()
	b.awaitReady("w1", v1.ConditionUnknown) // it cannot be on its way for ever
	b.failLeases.Store(false)
	b.awaitReady("w1", v1.ConditionTrue)
	depose()
	<-ended
}

// With no control plane at all the agent works from its checkpoint, in which Secrets are in the run folder alone.
func TestCheckpoint(t *testing.T) {
	b := newTestEnv(t, "cp1")
	b.createObject(&v1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "s"},
		Data: map[string][]byte{"k": []byte("very-secret-value")}})
	n := b.startAgent("w1", nil)
	p := b.createPod("p", "w1", func(p *v1.Pod) {
		p.Spec.ServiceAccountName = "default"
		p.Spec.Volumes = []v1.Volume{{Name: "v",
			VolumeSource: v1.VolumeSource{Secret: &v1.SecretVolumeSource{SecretName: "s"}}}}
	})
	held := n.awaitPod(b, p.UID)
	tok, _, err := n.Token(b.ctx, held, "", 3600)
	if err != nil || !strings.Contains(tok, "by-system:node:w1") {
		t.Fatalf("token %q, %v", tok, err)
	}
	if again, _, err := n.Token(b.ctx, held, "", 3600); err != nil || again != tok || b.tokens.Load() != 1 {
		t.Errorf("a token within 80%% of its lifetime was requested again: %q, %v", again, err)
	}
	b.awaitCondition("checkpoint", func() error {
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
	b.stopReplica("cp1")
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
	b.restartAgent(n, nil, []string{"127.0.0.1:1"})
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

// P16: the certificate is renewed after two thirds of its lifetime while the session continues.
func TestCertificateRenewal(t *testing.T) {
	b := newTestEnv(t, "cp1")
	// Certificates begin five minutes in the past: two thirds of this life end in half a second.
	b.certLife.Store(int64(5*time.Minute/2 + 750*time.Millisecond))
	n := b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	b.awaitCondition("renewal", func() error {
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
	p := b.createPod("p", "w1", nil)
	n.awaitPod(b, p.UID)
}

// A refused token ends the agent with a clear error instead of a loop.
func TestBadToken(t *testing.T) {
	b := newTestEnv(t, "cp1")
	f := strings.Split(b.token, ".")
	f[3] = strings.Repeat("0", len(f[3]))
	good := b.token
	b.token = strings.Join(f, ".")
	n := b.startAgent("w1", nil)
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
	b.network.dials = 0
	m := b.startAgent("w2", nil)
	b.awaitCondition("attempts to join", func() error {
		b.network.mu.Lock()
		defer b.network.mu.Unlock()
		if b.network.dials < 3 {
			return errors.New("too few")
		}
		return nil
	})
	if _, err := os.Stat(filepath.Join(m.state, "node.pem")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the agent trusted a server of another CA (%v)", err)
	}
}

// A heartbeat costs an agent one write, and no more: thousands of them come each second.
func TestHeartbeatIsOneWrite(t *testing.T) {
	const beat, beats = 50 * time.Millisecond, 60
	b := newTestEnvWith(t, timeouts{heartbeat: beat, suspect: time.Minute, grace: time.Minute}, "cp1")
	b.startAgent("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	last := func() time.Time { return b.awaitSession("w1").fleet.LastHeartbeats()["w1"] }
	heard := func(n int) {
		t.Helper()
		for range n {
			before := last()
			b.awaitCondition("a heartbeat", func() error {
				if !last().After(before) {
					return errors.New("none yet")
				}
				return nil
			})
		}
	}
	heard(10) // the initial messages of the session are over
	before, began := b.network.writes.Load(), time.Now()
	heard(beats)
	sent := b.network.writes.Load() - before
	most := max(beats, int64(time.Since(began)/beat)) // polling on a busy machine misses some of them
	t.Logf("%d heartbeats seen, %d at most, %d writes", beats, most, sent)
	if sent > most*3/2 {
		t.Errorf("the agent wrote %d times for %d heartbeats", sent, most)
	}
}
