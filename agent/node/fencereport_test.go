package node

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

const inUseName v1.UniqueVolumeName = "kubernetes.io/csi/disk.example^h"

// fenceView is the view of a node with one attached volume: volume h of CSI driver disk.example.
type fenceView struct {
	using
	confirmed chan struct{}
	fence     string // of the Node; "" = there is no Node
	report    string // of the Node
	kept      string // on the attachment; "" = the control plane does not store it there
}

func (v *fenceView) Confirmed() <-chan struct{} { return v.confirmed }
func (v *fenceView) VolumesInUse() (_, _ []v1.UniqueVolumeName, _ error) {
	return []v1.UniqueVolumeName{inUseName}, nil, nil
}

func (v *fenceView) Node() (*v1.Node, bool) {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{FencesAfterAnnotation: v.fence,
		FenceReportAnnotation: v.report}}}, v.fence != ""
}

func (v *fenceView) VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool) {
	a := &storagev1.VolumeAttachment{}
	if v.kept != "" {
		a.Annotations = map[string]string{keptFenceAnnotation: v.kept}
	}
	return a, driver == "disk.example" && handle == "h"
}

// fenceMachine is a machine on which agents with different --fence-after run one after the other.
type fenceMachine struct {
	t          *testing.T
	dir        string
	boot       string
	now, heard time.Duration
	view       *fenceView
	ended      []types.UID
	f          *fence
}

func newFenceMachine(t *testing.T) *fenceMachine {
	m := &fenceMachine{t: t, dir: t.TempDir(), boot: "b1", now: 100 * time.Second}
	m.view = &fenceView{using: using{pods: []types.UID{"u1"}}, confirmed: make(chan struct{})}
	return m
}

// startAgent starts an agent with the view of a checkpoint.
func (m *fenceMachine) startAgent(after time.Duration) {
	m.t.Helper()
	m.view.confirmed = make(chan struct{})
	m.f = &fence{after: after, lastAck: func() time.Duration {
		return m.heard
	}, clock: func() time.Duration { return m.now },
		volumes: m.view, objects: m.view, fencePod: func(uid types.UID, _ string) { m.ended = append(m.ended, uid) },
		contact: lastContact{file: filepath.Join(m.dir, "heard.json"), boot: m.boot},
		reports: fenceReportFile(m.dir), boot: m.boot,
		log: slog.New(slog.DiscardHandler)}
	if err := m.f.startReport(); err != nil {
		m.t.Fatal(err)
	}
	m.f.contact.loadRecord(m.now, m.f.log)
}

// storeFacts makes the control plane store the agent's report, and respond.
func (m *fenceMachine) storeFacts() {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
	m.f.annotate(n, volumeUses{})
	m.view.fence = n.Annotations[FencesAfterAnnotation]
	if r := n.Annotations[FenceReportAnnotation]; r != "" {
		m.view.report = r
	}
	select {
	case <-m.view.confirmed:
	default:
		close(m.view.confirmed)
	}
	m.heard = m.now
}

// expectFence fails unless the pods are terminated after that time of disconnection, and not
// earlier; 0 = never.
func (m *fenceMachine) expectFence(what string, after time.Duration) {
	m.t.Helper()
	look := func() bool {
		m.ended = nil
		if err := m.f.checkFence(); err != nil {
			m.t.Fatal(err)
		}
		if closed := m.f.isFenced(); closed != slices.Contains(m.ended, "u1") {
			m.t.Errorf("%s: closed %v, ended %v", what, closed, m.ended)
		}
		return len(m.ended) > 0
	}
	m.heard = m.now
	if look() {
		m.t.Errorf("%s: fenced at once", what)
	}
	if after == 0 {
		if m.now += 24 * time.Hour; look() {
			m.t.Errorf("%s: fenced after a day", what)
		}
		return
	}
	if m.now += after - time.Second; look() {
		m.t.Errorf("%s: fenced before %s", what, after)
	}
	if m.now += time.Second; !look() {
		m.t.Errorf("%s: not fenced after %s", what, after)
	}
}

// F110: a longer fence holds once the control plane has it: on the Node, by this agent's report, and on the
// attachments of the volumes in use. Until then the previous fence holds, however often the agent is
// restarted. A shorter fence holds at once.
func TestLongerFenceWaitsForTheControlPlane(t *testing.T) {
	const short, long = 20 * time.Second, 300 * time.Second
	for _, longer := range []time.Duration{long, 0} {
		m := newFenceMachine(t)
		m.startAgent(short)
		m.expectFence("a new node", short)
		m.storeFacts()
		m.view.kept = "20"
		m.expectFence("the fence is stored", short)
		m.startAgent(longer)
		m.expectFence("no control plane answers", short)
		m.startAgent(longer)
		m.expectFence("no control plane answers the next agent", short)
		close(m.view.confirmed)
		m.expectFence("a control plane that has the previous fence", short)
		m.view.fence = map[time.Duration]string{long: "300", 0: "0"}[longer]
		m.view.report = "another"
		m.expectFence("a Node that is older than the report", short)
		m.storeFacts()
		m.expectFence("the attachment has the previous fence", short)
		m.view.kept = m.view.fence
		m.expectFence("all have it", longer)
		m.startAgent(longer)
		m.expectFence("the next agent with that fence", longer)
		m.startAgent(short)
		m.expectFence("a shorter fence holds at once", short)
		m.startAgent(longer)
		m.expectFence("the control plane may have received the shorter fence", short)
	}
}

// F110: a control plane of the previous release keeps no fences on attachments: the Node alone counts. An
// agent of that release has left no record: the fence of the checkpoint holds. After a boot nothing runs
// by a fence that was reported before.
func TestFencesOfThePreviousRelease(t *testing.T) {
	const short, long = 20 * time.Second, 300 * time.Second
	m := newFenceMachine(t)
	m.view.fence = "20"
	m.startAgent(long)
	m.expectFence("the checkpoint has the previous fence", short)
	m.storeFacts()
	m.expectFence("the Node has it", long)
	for _, damage := range []string{"", "{"} {
		if err := os.WriteFile(fenceReportFile(m.dir), []byte(damage), 0o600); err != nil {
			t.Fatal(err)
		}
		m.view.fence = "20"
		m.startAgent(long)
		m.expectFence("the record is damaged", short)
	}
	m.boot, m.view.fence = "b2", "60"
	m.startAgent(long)
	m.expectFence("after a boot", time.Minute)
	m.view.fence = "soon"
	m.startAgent(long)
	m.expectFence("a Node with a fence that is no number", long)
}

// F110: the names of attached volumes are read as they are written.
func TestAttachedNames(t *testing.T) {
	for name, want := range map[v1.UniqueVolumeName][2]string{
		inUseName: {"disk.example", "h"}, "kubernetes.io/csi/d^a^b": {"d", "a^b"},
		"kubernetes.io/iscsi/iqn.2001-04.example:x:0": {"iscsi.keelson.dev", "iqn.2001-04.example:x:0"},
	} {
		if driver, handle, ok := agent.ParseAttachedName(name); !ok || [2]string{driver, handle} != want {
			t.Errorf("%s: %q, %q, %v", name, driver, handle, ok)
		}
	}
	for _, name := range []v1.UniqueVolumeName{"", "x", "kubernetes.io/csi/x", "kubernetes.io/nfs/x"} {
		if driver, handle, ok := agent.ParseAttachedName(name); ok {
			t.Errorf("%q: %q, %q", name, driver, handle)
		}
	}
}
