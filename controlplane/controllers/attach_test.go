package controllers_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

const diskDriver = "disk.example"

// disks is a driver whose volumes are attached to one node each, and the nodes that mount them.
type disks struct {
	mu       sync.Mutex
	made     map[string]bool              // volumes that were asked for
	at       map[string]string            // where a volume is published, by handle
	mounted  map[string]map[string]bool   // nodes that have a volume mounted
	dead     map[string]bool              // nodes without power
	wrong    []string                     // what must never be
	flaky    *rand.Rand                   // loses calls, before or after they were made
	hook     func(method string) error    // after a call was made
	secrets  map[string]map[string]string // of each kind of call, as seen last
	unmounts bool                         // nodes unmount what no pod needs
	iscsi    bool                         // volumes are disks of iSCSI targets, of which nothing is asked
}

// name is how a Node's status names a volume.
func (d *disks) name(volume string) corev1.UniqueVolumeName {
	if d.iscsi {
		return corev1.UniqueVolumeName("kubernetes.io/iscsi/iqn.2026-01.example:" + volume + ":3")
	}
	return api.AttachedName(diskDriver, volume)
}

func (d *disks) set(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
}

func (d *disks) complain(format string, args ...any) {
	d.wrong = append(d.wrong, fmt.Sprintf(format, args...))
}

func (d *disks) call(node, method string, request []byte) ([]byte, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead[node] {
		return nil, errors.New("node " + node + " has no power")
	}
	lost := 0
	if d.flaky != nil {
		lost = d.flaky.IntN(4)
	}
	if lost == 1 {
		return nil, errors.New("the node was not reached")
	}
	method = method[strings.LastIndex(method, "/")+1:]
	answer, err := d.do(method, request)
	if err == nil && d.hook != nil {
		err = d.hook("call " + method)
	}
	if lost == 2 {
		err = errors.New("the tunnel broke")
	}
	if err != nil {
		return nil, err
	}
	return proto.Marshal(answer)
}

func (d *disks) do(method string, request []byte) (proto.Message, error) {
	switch method {
	case "ControllerGetCapabilities":
		can := func(t csi.ControllerServiceCapability_RPC_Type) *csi.ControllerServiceCapability {
			return &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}}}
		}
		return &csi.ControllerGetCapabilitiesResponse{Capabilities: []*csi.ControllerServiceCapability{can(csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME)}}, nil
	case "ControllerPublishVolume":
		q := &csi.ControllerPublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.secrets[method] = q.Secrets
		if at := d.at[q.VolumeId]; at != "" && at != q.NodeId {
			d.complain("volume %s is asked for by %s while %s has it", q.VolumeId, q.NodeId, at)
			return nil, status.Errorf(codes.FailedPrecondition, "%s has it", at)
		}
		d.at[q.VolumeId] = q.NodeId
		return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{"device": "/dev/" + q.VolumeId}}, nil
	case "ControllerUnpublishVolume":
		q := &csi.ControllerUnpublishVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.secrets[method] = q.Secrets
		node := strings.TrimPrefix(q.NodeId, "id-")
		if d.mounted[q.VolumeId][node] {
			d.complain("volume %s is taken from %s, which has it mounted", q.VolumeId, node)
		}
		if d.at[q.VolumeId] == q.NodeId {
			delete(d.at, q.VolumeId)
		}
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	case "CreateVolume":
		q := &csi.CreateVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		d.made[q.Name] = true
		return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: q.Name, CapacityBytes: q.CapacityRange.RequiredBytes}}, nil
	case "DeleteVolume":
		q := &csi.DeleteVolumeRequest{}
		if err := proto.Unmarshal(request, q); err != nil {
			return nil, err
		}
		if at := d.at[q.VolumeId]; at != "" {
			d.complain("volume %s is deleted while %s has it", q.VolumeId, at)
		}
		delete(d.made, q.VolumeId)
		return &csi.DeleteVolumeResponse{}, nil
	}
	return nil, status.Error(codes.Unimplemented, method)
}

// power cuts a node off, or brings it back with nothing mounted.
func (w *world) power(node string, on bool) {
	w.t.Helper()
	w.nodes.set(w.nodes.dead, node, !on)
	d := w.drivers.disks
	d.set(func() {
		d.dead[node] = !on
		for _, m := range d.mounted {
			delete(m, node)
		}
	})
	state := corev1.ConditionTrue
	if !on {
		state = corev1.ConditionUnknown
	}
	w.setReady(node, state)
}

// disksOn has a driver that attaches on nodes, and whoever mounts its volumes there.
func (w *world) disksOn(nodes ...string) *disks {
	w.t.Helper()
	d := &disks{made: map[string]bool{}, at: map[string]string{}, mounted: map[string]map[string]bool{}, dead: map[string]bool{}, secrets: map[string]map[string]string{}, unmounts: true}
	w.drivers.set(func() { w.drivers.disks = d })
	w.create(&storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: diskDriver, Annotations: map[string]string{controllers.ServedByAnnotation: controllers.ServedByAgent}}})
	for _, n := range nodes {
		update(w, n, func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationFencesAfter, "20") })
		w.create(&storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: diskDriver, NodeID: "id-" + n}}}})
	}
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	for _, n := range nodes {
		running.Go(func() {
			for ctx.Err() == nil {
				w.mounts(ctx, d, n)
				time.Sleep(50 * time.Millisecond) // of the bubble's own time
			}
		})
	}
	w.t.Cleanup(func() { cancel(); running.Wait() })
	return d
}

// mounts is what the agent of a node does once: it tells what it uses before it mounts, and until it has unmounted.
func (w *world) mounts(ctx context.Context, d *disks, node string) {
	d.mu.Lock()
	dead := d.dead[node]
	d.mu.Unlock()
	n, err := client.Get[*corev1.Node](ctx, w.admin, "", node)
	if err != nil || dead {
		return
	}
	if c := controllers.NodeCondition(n, corev1.NodeReady); c == nil || c.Status != corev1.ConditionTrue {
		return
	}
	needed := map[string]bool{}
	for _, p := range w.pods() {
		for _, v := range p.Spec.Volumes {
			if v.PersistentVolumeClaim == nil || p.Spec.NodeName != node || controllers.PodEnded(p) {
				continue
			}
			c, err := client.Get[*corev1.PersistentVolumeClaim](ctx, w.admin, "default", v.PersistentVolumeClaim.ClaimName)
			if err == nil && c.Spec.VolumeName != "" {
				needed[c.Spec.VolumeName] = true
			}
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead[node] {
		return
	}
	inUse := []corev1.UniqueVolumeName{}
	for h := range needed {
		name := d.name(h)
		inUse = append(inUse, name)
		has := slices.ContainsFunc(n.Status.VolumesAttached, func(v corev1.AttachedVolume) bool { return v.Name == name })
		if has && slices.Contains(n.Status.VolumesInUse, name) && !d.mounted[h][node] {
			d.mount(h, node)
		}
	}
	for h, m := range d.mounted {
		if m[node] && !needed[h] {
			if d.unmounts {
				delete(m, node)
			}
			inUse = append(inUse, d.name(h)) // until the next look
		}
	}
	slices.Sort(inUse)
	if inUse = slices.Compact(inUse); !slices.Equal(inUse, n.Status.VolumesInUse) {
		next := n.DeepCopy()
		next.Status.VolumesInUse = inUse
		_, _ = client.UpdateStatus(ctx, w.admin, next) // the next look is the retry
	}
}

func (d *disks) mount(h, node string) {
	if !d.iscsi && d.at[h] != "id-"+node {
		d.complain("volume %s is mounted on %s, and published to %q", h, node, d.at[h])
	}
	if d.mounted[h] == nil {
		d.mounted[h] = map[string]bool{}
	}
	d.mounted[h][node] = true
	if len(d.mounted[h]) > 1 {
		d.complain("volume %s is mounted on %v", h, slices.Sorted(maps.Keys(d.mounted[h])))
	}
}

// eventWith waits for an event whose message contains words.
func (w *world) eventWith(reason, words string) {
	w.t.Helper()
	w.eventually("event "+reason+" "+words, func() error {
		list, err := client.List[*corev1.Event](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		var seen []string
		for _, e := range list {
			if e.Reason == reason && strings.Contains(e.Message, words) {
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return errors.New(strings.Join(seen, "\n"))
	})
}

// disk makes a volume of the driver, named as its handle.
func (w *world) disk(name string) {
	w.t.Helper()
	v := volume(name, "1Gi")
	v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: diskDriver, VolumeHandle: name,
		ControllerPublishSecretRef: &corev1.SecretReference{Namespace: "default", Name: "key"}}}
	if w.drivers.disks.iscsi {
		v.Spec.PersistentVolumeSource = corev1.PersistentVolumeSource{ISCSI: &corev1.ISCSIPersistentVolumeSource{TargetPortal: "192.0.2.1", IQN: "iqn.2026-01.example:" + name, Lun: 3}}
	}
	w.create(v)
}

// user is a pod on a node that uses a claim.
func user(name, node, claim string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, Spec: corev1.PodSpec{NodeName: node,
		Containers: []corev1.Container{{Name: "c", Image: "i"}},
		Volumes:    []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}}}
}

// mountedOn waits until a volume is mounted on a node and nowhere else; "" = nowhere, and attached to none.
func (w *world) mountedOn(within time.Duration, handle, node string) {
	w.t.Helper()
	d := w.drivers.disks
	w.within(within, "volume "+handle+" on "+node, func() error {
		list, err := client.List[*storagev1.VolumeAttachment](w.ctx, w.admin, "", metav1.ListOptions{})
		if err != nil {
			return err
		}
		list = slices.DeleteFunc(list, func(a *storagev1.VolumeAttachment) bool { return *a.Spec.Source.PersistentVolumeName != handle })
		d.mu.Lock()
		defer d.mu.Unlock()
		on := slices.Collect(maps.Keys(d.mounted[handle]))
		switch {
		case node == "" && (len(on) > 0 || d.at[handle] != "" || len(list) > 0), node != "" && (len(on) != 1 || on[0] != node || len(list) != 1):
			return fmt.Errorf("mounted on %v, published to %q, %d attachments", on, d.at[handle], len(list))
		}
		return nil
	})
}

func (w *world) nothingWrong() {
	w.t.Helper()
	d := w.drivers.disks
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, s := range d.wrong {
		w.t.Error(s)
	}
}

// attaching is a world with a disk that pod db-0 of a StatefulSet uses.
func attaching(t *testing.T, o options, f func(w *world, d *disks, node string)) {
	t.Helper()
	attachingOf(t, o, false, f)
}

func attachingOf(t *testing.T, o options, iscsi bool, f func(w *world, d *disks, node string)) {
	t.Helper()
	virtual.Test(t, func(t *testing.T) {
		o.engine, o.quiet = controllers.Options{OwnIdentity: true, Resync: time.Minute}, true
		w := start(t, o)
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}, Data: map[string][]byte{"k": []byte("s3cret")}})
		d := w.disksOn("w1", "w2", "w3")
		d.set(func() { d.iscsi = iscsi })
		w.disk("v")
		w.create(stateful("db", 1, "db:1"))
		w.statefulDone("db", 1)
		node := w.pods()[0].Spec.NodeName
		w.eventually("the claim is a volume of the pod", func() error { return w.uses("db-0", "data-db-0") })
		w.mountedOn(30*time.Second, "v", node)
		f(w, d, node)
		w.nothingWrong()
	})
}

func (w *world) uses(pod, claim string) error {
	p, err := client.Get[*corev1.Pod](w.ctx, w.admin, "default", pod)
	if err == nil && !slices.Contains(controllers.PodClaims(p), "default/"+claim) {
		err = fmt.Errorf("pod %s uses %v", pod, controllers.PodClaims(p))
	}
	return err
}

// F110: what a pod's volume is attached to follows the pod; a node that loses power is fenced and then loses it.
func TestVolumeFollowsItsPod(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		a, err := client.Get[*storagev1.VolumeAttachment](w.ctx, w.admin, "", api.AttachmentName("v", diskDriver, node))
		if err != nil || !a.Status.Attached || a.Status.AttachmentMetadata["device"] != "/dev/v" || a.Spec.Attacher != diskDriver || *a.Spec.Source.PersistentVolumeName != "v" {
			t.Fatalf("%+v, %v", a, err)
		}
		began := time.Now()
		w.power(node, false)
		w.within(time.Minute, "the pod elsewhere", func() error {
			for _, p := range w.pods() {
				if p.Spec.NodeName != node && p.Spec.NodeName != "" && controllers.PodReady(p) {
					node = p.Spec.NodeName
					return nil
				}
			}
			return errors.New("not yet")
		})
		w.mountedOn(10*time.Second, "v", node)
		if took := time.Since(began); took < 25*time.Second || took > 40*time.Second {
			t.Errorf("it moved after %s", took)
		}
		w.eventWith("NodeFenced", "has ended the pod by itself")
		for _, m := range []string{"ControllerPublishVolume", "ControllerUnpublishVolume"} {
			if d.secrets[m]["k"] != "s3cret" {
				t.Errorf("%s was called with %v", m, d.secrets[m])
			}
		}
		for _, n := range []string{"w1", "w2", "w3"} {
			if n != node {
				w.power(n, true)
			}
		}
		time.Sleep(time.Minute)
		w.mountedOn(time.Second, "v", node)
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.mountedOn(30*time.Second, "v", "")
	})
}

// F110: a node that is declared dead loses its volumes at once; one that may never end its pods by itself loses them so only.
func TestNodeOutOfService(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		update(w, node, func(n *corev1.Node) { n.Annotations[api.AnnotationFencesAfter] = "0" })
		w.power(node, false)
		time.Sleep(10 * time.Minute)
		if p := w.pods(); len(p) > 0 { // that of the lost node is being deleted
			t.Fatalf("it moved: %v", p)
		}
		began := time.Now()
		update(w, node, func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute})
		})
		w.within(5*time.Second, "the pod elsewhere", func() error {
			p := w.pods()
			if len(p) != 1 || p[0].Spec.NodeName == node || !controllers.PodReady(p[0]) {
				return errors.New("not yet")
			}
			return nil
		})
		w.mountedOn(5*time.Second, "v", w.pods()[0].Spec.NodeName)
		t.Logf("moved after %s", time.Since(began))
	})
}

// F110: who else has a volume is said to the pod that waits for it.
func TestMultiAttachIsRefused(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.create(user("late", other, "data-db-0"))
		w.eventWith("FailedAttachVolume", fmt.Sprintf(`Multi-Attach error for volume "v": its access modes let one node have it, and node %s has it for pod default/db-0: it moves when that pod is gone`, node))
		d.set(func() { d.unmounts = false })
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.eventWith("FailedAttachVolume", fmt.Sprintf("and node %s has not unmounted it yet", node))
		time.Sleep(10 * time.Minute) // it speaks, and says that it uses the volume
		w.mountedOn(time.Second, "v", node)
		d.set(func() { d.unmounts = true })
		w.mountedOn(10*time.Second, "v", other)
	})
}

// F110: a disk of an iSCSI target is one node's at a time as well, though nobody is asked to attach it: who has it is told to others
// that want it, and a node that loses power is fenced before it moves.
func TestDisksOfTargetsMove(t *testing.T) {
	attachingOf(t, options{}, true, func(w *world, d *disks, node string) {
		a, err := client.Get[*storagev1.VolumeAttachment](w.ctx, w.admin, "", api.AttachmentName("iqn.2026-01.example:v:3", api.ISCSIAttacher, node))
		if err != nil || !a.Status.Attached || *a.Spec.Source.PersistentVolumeName != "v" {
			t.Fatalf("%+v, %v", a, err)
		}
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.create(user("late", other, "data-db-0"))
		w.eventWith("FailedAttachVolume", fmt.Sprintf(`Multi-Attach error for volume "v": its access modes let one node have it, and node %s has it for pod default/db-0`, node))
		d.set(func() { d.unmounts = false })
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.eventWith("FailedAttachVolume", fmt.Sprintf("and node %s has not unmounted it yet", node))
		time.Sleep(10 * time.Minute)
		w.mountedOn(time.Second, "v", node)
		w.power(node, false)
		w.within(time.Minute, "the volume elsewhere", func() error {
			d.mu.Lock()
			defer d.mu.Unlock()
			if !d.mounted["v"][other] {
				return errors.New("not yet")
			}
			return nil
		})
		w.mountedOn(10*time.Second, "v", other)
		d.set(func() { d.unmounts = true })
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "late", metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
			t.Fatal(err)
		}
		w.mountedOn(30*time.Second, "v", "")
	})
}

// dying is a backend that loses the answer of one call, and tells of it.
type dying struct {
	api.Backend
	mu   sync.Mutex
	at   string
	died chan struct{}
}

func (b *dying) kill(step string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.at == "" || step != b.at {
		return nil
	}
	b.at = ""
	b.died <- struct{}{}
	return errors.New("killed after " + step)
}

func (b *dying) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	out, err := b.Backend.Do(ctx, r)
	if err == nil && strings.Contains(r.User.Name, "attachdetach") {
		step := string(r.Verb) + " " + r.Kind.Resource
		if r.Subresource != "" {
			step += "/" + r.Subresource
		}
		if dead := b.kill(step); dead != nil {
			return nil, dead
		}
	}
	return out, err
}

// F110: a leader that dies after any of its steps leaves what the next one finishes.
func TestAttachingStepByStep(t *testing.T) {
	for _, step := range []string{"create volumeattachments", "update volumeattachments", "call ControllerPublishVolume", "update volumeattachments/status", "update nodes/status"} {
		stepDies(t, step, true)
	}
	for _, step := range []string{"update nodes/status", "delete volumeattachments", "call ControllerUnpublishVolume", "update volumeattachments"} {
		stepDies(t, step, false)
	}
}

func stepDies(t *testing.T, step string, up bool) {
	t.Helper()
	t.Run(fmt.Sprintf("%s %v", step, up), func(t *testing.T) {
		virtual.Test(t, func(t *testing.T) {
			b := &dying{died: make(chan struct{}, 1)}
			engine := controllers.Options{OwnIdentity: true, Resync: time.Minute}
			w := newWorld(t, options{quiet: true, behind: func(real api.Backend) api.Backend { b.Backend = real; return b }})
			stop := w.lead(engine)
			defer func() { stop() }()
			w.node("w1")
			w.node("w2")
			w.usable(2)
			w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
			d := w.disksOn("w1", "w2")
			d.hook = b.kill
			w.disk("v")
			w.create(claim("data", "1Gi"))
			w.boundTo("data")
			arm := func() { b.mu.Lock(); b.at = step; b.mu.Unlock() }
			await := func() {
				<-b.died
				stop()
				stop = w.lead(engine)
			}
			if up {
				arm()
			}
			w.create(user("a", "w1", "data"))
			if up {
				await()
			}
			w.mountedOn(3*time.Minute, "v", "w1")
			if !up {
				arm()
			}
			w.create(user("b", "w2", "data"))
			if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "a", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if !up {
				await()
			}
			w.mountedOn(3*time.Minute, "v", "w2")
			if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", "b", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			w.mountedOn(3*time.Minute, "v", "")
			w.nothingWrong()
		})
	})
}

// F110: whatever is lost or killed, no volume is ever in two places, and in the end each is where its pod is.
func TestAttachingUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true, change: failing("attachdetach-controller", 3, 2*time.Millisecond)})
		engine := controllers.Options{Resync: time.Second}
		stop := w.lead(engine)
		defer func() { stop() }()
		for _, n := range []string{"w1", "w2"} {
			w.node(n)
		}
		w.usable(2)
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
		d := w.disksOn("w1", "w2")
		d.set(func() { d.flaky = rand.New(rand.NewPCG(7, 8)) })
		w.disk("v")
		w.create(claim("data", "1Gi"))
		w.boundTo("data")
		r := rand.New(rand.NewPCG(3, 4))
		last := ""
		for i := range 30 {
			name := fmt.Sprint("p", i)
			node := fmt.Sprint("w", 1+r.IntN(2))
			w.create(user(name, node, "data"))
			if last != "" {
				if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", last, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
			}
			last = name
			time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
			if i%7 == 6 {
				stop()
				stop = w.lead(engine)
			}
			if i == 29 {
				d.set(func() { d.flaky = nil })
				w.mountedOn(5*time.Minute, "v", node)
			}
		}
		w.nothingWrong()
		if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", last, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.mountedOn(5*time.Minute, "v", "")
		w.nothingWrong()
	})
}
