package controllers_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

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
	if err == nil && !slices.Contains(controllers.PodClaimKeys(p), "default/"+claim) {
		err = fmt.Errorf("pod %s uses %v", pod, controllers.PodClaimKeys(p))
	}
	return err
}

// F110: the attachment of a volume follows its pod. A node that loses power is fenced and then
// loses the volume.
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
				if p.Spec.NodeName != node && p.Spec.NodeName != "" && controllers.IsPodReady(p) {
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

// F110: a node with the taint out-of-service loses its volumes at once. A node that never stops its
// pods by itself loses them only that way.
func TestNodeOutOfService(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		update(w, node, func(n *corev1.Node) { n.Annotations[api.AnnotationFencesAfter] = "0" })
		w.power(node, false)
		time.Sleep(10 * time.Minute)   // virtual time: it stays so
		if p := w.pods(); len(p) > 0 { // that of the lost node is being deleted
			t.Fatalf("it moved: %v", p)
		}
		began := time.Now()
		update(w, node, func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService, Effect: corev1.TaintEffectNoExecute})
		})
		w.within(5*time.Second, "the pod elsewhere", func() error {
			p := w.pods()
			if len(p) != 1 || p[0].Spec.NodeName == node || !controllers.IsPodReady(p[0]) {
				return errors.New("not yet")
			}
			return nil
		})
		w.mountedOn(5*time.Second, "v", w.pods()[0].Spec.NodeName)
		t.Logf("moved after %s", time.Since(began))
	})
}

// F110: an event of the waiting pod names the holder of the volume.
func TestMultiAttachIsRefused(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.create(user("late", other, "data-db-0"))
		w.eventWith("FailedAttachVolume", fmt.Sprintf(`Multi-Attach error for volume "v": its access modes let one node have it, and node %s has it for pod default/db-0: it moves when that pod is gone`, node))
		d.set(func() { d.unmounts = false })
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.eventWith("FailedAttachVolume", fmt.Sprintf("and node %s has not unmounted it yet", node))
		time.Sleep(10 * time.Minute) // it connects and reports that it uses the volume
		w.mountedOn(time.Second, "v", node)
		d.set(func() { d.unmounts = true })
		w.mountedOn(10*time.Second, "v", other)
	})
}

// F110: a backup in which a pod waited for a volume is restored after the holder has changed. The
// node that reports the volume gets it, and the attachment of the backup is deleted without a
// driver call. The events of waiting pods name the holder.
func TestVolumesStayWithWhoHasThemAfterARestore(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.create(user("late", other, "data-db-0"))
		w.eventWith("FailedAttachVolume", "for pod default/db-0: it moves when that pod is gone")
		d.set(func() { d.dead[node], d.dead[other] = true, true }) // they are not connected
		v, here := "v", api.AttachmentName("v", diskDriver, node)
		for _, n := range []string{node, other} {
			update(w, n, func(n *corev1.Node) { metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationUnheard, "") })
		}
		time.Sleep(time.Second) // virtual time: the controller has observed it
		w.within(30*time.Second, "the store of the backup", func() error {
			for _, n := range []string{node, other} {
				n, err := client.Get[*corev1.Node](w.ctx, w.admin, "", n)
				if err != nil {
					return err
				}
				n = n.DeepCopy()
				n.Status.VolumesAttached = nil
				if _, err := client.UpdateStatus(w.ctx, w.admin, n); err != nil {
					return err
				}
			}
			a, err := client.Get[*storagev1.VolumeAttachment](w.ctx, w.admin, "", here)
			if err != nil {
				return err
			}
			a = a.DeepCopy()
			a.Finalizers = nil
			if _, err := client.Update(w.ctx, w.admin, a); err != nil {
				return err
			}
			_, err = client.Create(w.ctx, w.admin, &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: api.AttachmentName("v", diskDriver, other)},
				Spec: storagev1.VolumeAttachmentSpec{Attacher: diskDriver, NodeName: other, Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &v}}})
			if err == nil {
				err = client.Delete[*storagev1.VolumeAttachment](w.ctx, w.admin, "", here, metav1.DeleteOptions{})
			}
			return err
		})
		w.eventWith("FailedAttachVolume", "kubectl delete node "+other)
		w.eventWith("FailedAttachVolume", "kubectl delete node "+node)
		for _, n := range []string{other, node} {
			d.set(func() { d.dead[n] = false })
			time.Sleep(10 * time.Second) // virtual time: the node has reported its volumes
			update(w, n, func(n *corev1.Node) { delete(n.Annotations, api.AnnotationUnheard) })
			time.Sleep(10 * time.Second)
		}
		w.mountedOn(time.Minute, "v", node)
		w.eventWith("FailedAttachVolume", fmt.Sprintf("node %s has it for pod default/db-0: it moves when that pod is gone", node))
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.mountedOn(time.Minute, "v", other)
	})
}

// F110: after a restore, a volume without a known holder is given to no node for a while. A node
// that joined after the backup may have it, and stops its pods within that time if it cannot
// connect. Events of the pods report this. Then the volume is treated like any other.
func TestVolumesWaitForNodesThatAreNotKnown(t *testing.T) {
	attaching(t, options{}, func(w *world, d *disks, node string) {
		update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.mountedOn(time.Minute, "v", "")
		update(w, "v", func(v *corev1.PersistentVolume) {
			metav1.SetMetaDataAnnotation(&v.ObjectMeta, api.AnnotationUnheard, "")
		})
		time.Sleep(time.Second) // virtual time: the controller has observed it
		w.create(user("late", node, "data-db-0"))
		w.eventWith("FailedAttachVolume", "a node that joined after it was made may have it mounted")
		time.Sleep(50 * time.Second)
		d.set(func() {
			if at := d.at["v"]; at != "" {
				t.Errorf("on %s while such a node may have it", at)
			}
		})
		w.mountedOn(20*time.Second, "v", node)
		if v, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", "v"); err != nil || api.Unheard(v) {
			t.Errorf("afterwards it has the mark: %v, error %v", v.Annotations, err)
		}
	})
}

// F110: after a restore, a single-pod volume that is not attached has the restore mark until all
// nodes have reported and pods that the store lacks have ended. An event of its pod names the node
// for which it waits.
func TestVolumesOfOnePodWaitForNodes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true, Resync: time.Minute}, quiet: true})
		w.disksOn("w1", "w2")
		modes, small := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}, corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "share", Annotations: map[string]string{api.AnnotationUnheard: ""}}}
		pv.Spec = corev1.PersistentVolumeSpec{AccessModes: modes, Capacity: small, ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: "sole"}}
		pv.Spec.NFS = &corev1.NFSVolumeSource{Server: "192.0.2.1", Path: "/a"}
		none := ""
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "sole"}}
		claim.Spec = corev1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: &none, VolumeName: "share", Resources: corev1.VolumeResourceRequirements{Requests: small}}
		tells := func(unheard bool, list string) {
			update(w, "w2", func(n *corev1.Node) {
				n.Annotations[api.AnnotationClaimsHeld] = list
				if delete(n.Annotations, api.AnnotationUnheard); unheard {
					n.Annotations[api.AnnotationUnheard] = ""
				}
			})
		}
		marked := func(want bool) {
			t.Helper()
			w.within(10*time.Second, fmt.Sprint("the mark: ", want), func() error {
				v, err := client.Get[*corev1.PersistentVolume](w.ctx, w.admin, "", "share")
				if err == nil && api.Unheard(v) != want {
					err = fmt.Errorf("it has %v", v.Annotations)
				}
				return err
			})
		}
		tells(true, "[]")
		w.create(pv)
		w.create(claim)
		w.create(user("late", "w1", "sole"))
		w.eventWith("FailedAttachVolume", `volume "share" is one pod's, and node w2 has not been heard since a backup was restored`)
		time.Sleep(2 * time.Minute) // of the bubble: the time of nodes that are not known is over
		marked(true)
		tells(false, `[{"pod":"gone","claim":"former","volume":"share"}]`)
		w.eventWith("FailedAttachVolume", "node w2 has it for a pod that is not there any more (uid gone)")
		marked(true)
		tells(false, "[]")
		marked(false)
	})
}

// F110: an iSCSI disk is attached to one node at a time too, although no driver is called. Events
// of other pods name the holder, and a node that loses power is fenced before the disk moves.
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
		time.Sleep(10 * time.Minute) // virtual time: it stays so
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

// F110: PersistentVolumes of one disk, with any portals of its target and any case of its name,
// count as one volume. A pod on another node waits, and its event names both volumes. A pod on the
// same node gets the disk. The node keeps it until both pods are gone.
func TestVolumesThatShowTheSame(t *testing.T) {
	for _, iscsi := range []bool{false, true} {
		t.Run(fmt.Sprintf("iscsi=%v", iscsi), func(t *testing.T) {
			attachingOf(t, options{}, iscsi, func(w *world, d *disks, node string) {
				w.diskOf("v2", "v", "192.0.2.2:3261", "192.0.2.1")
				again := claim("again", "1Gi")
				again.Spec.VolumeName = "v2"
				w.create(again)
				w.boundTo("again")
				other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
				w.create(user("late", other, "again"))
				what := map[bool]string{false: "volume v of CSI driver disk.example", true: "iSCSI disk iqn.2026-01.example:v:3"}[iscsi]
				says := fmt.Sprintf(`Multi-Attach error for volume "v2": it shows the same as volume "v" (%s), its access modes let one node have it, and node %s has it for pod default/db-0: it moves when that pod is gone`, what, node)
				w.eventWith("FailedAttachVolume", says)
				// A pod that runs before the controller has processed its volume gets no event.
				w.nodes.set(w.nodes.held, "beside", true)
				beside := user("beside", node, "again")
				beside.Labels = map[string]string{"app": "beside"}
				w.create(beside)
				w.eventWith("SuccessfulAttachVolume", `succeeded for volume "v2"`)
				update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
				w.eventWith("FailedAttachVolume", fmt.Sprintf(`Multi-Attach error for volume "v2": its access modes let one node have it, and node %s has it for pod default/beside`, node))
				time.Sleep(10 * time.Minute) // virtual time: it stays so
				w.mountedOn(time.Second, "v", node)
				for _, p := range []string{"beside", "late"} {
					if err := client.Delete[*corev1.Pod](w.ctx, w.admin, "default", p, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
						t.Fatal(err)
					}
					w.mountedOn(30*time.Second, "v", map[string]string{"beside": other}[p])
				}
			})
		})
	}
}

// dying is a backend that loses the response of one call and signals it.
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

// F110: the next leader completes the work of a leader that dies after any step.
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

// F110: regardless of lost calls and crashes, no volume is attached to two nodes through either of
// its PersistentVolumes. At the end each volume is where its pod is.
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
		w.diskOf("v2", "v")
		w.create(claim("data2", "1Gi"))
		w.boundTo("data2")
		r := rand.New(rand.NewPCG(3, 4))
		last := ""
		for i := range 30 {
			name := fmt.Sprint("p", i)
			node := fmt.Sprint("w", 1+r.IntN(2))
			w.create(user(name, node, []string{"data", "data2"}[r.IntN(2)]))
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
