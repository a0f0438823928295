package volumeattach_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F110: the attachment of a volume follows its pod. A node that loses power is fenced and then
// loses the volume.
func TestVolumeFollowsItsPod(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		a, err := client.Get[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "",
			api.AttachmentName("v", testcluster.DiskDriver, node))
		if err != nil || !a.Status.Attached || a.Status.AttachmentMetadata["device"] != "/dev/v" ||
			a.Spec.Attacher != testcluster.DiskDriver || *a.Spec.Source.PersistentVolumeName != "v" {
			t.Fatalf("%+v, %v", a, err)
		}
		began := time.Now()
		testcluster.SetPower(w, node, false)
		w.EventuallyWithin(time.Minute, "the pod elsewhere", func() error {
			for _, p := range w.LivePods() {
				if p.Spec.NodeName != node && p.Spec.NodeName != "" && api.IsPodReady(p) {
					node = p.Spec.NodeName
					return nil
				}
			}
			return errors.New("not yet")
		})
		testcluster.AwaitMounted(w, 10*time.Second, "v", node)
		if took := time.Since(began); took < 25*time.Second || took > 40*time.Second {
			t.Errorf("it moved after %s", took)
		}
		w.AwaitEventContaining("NodeFenced", "its agent stops the pod")
		for _, m := range []string{"ControllerPublishVolume", "ControllerUnpublishVolume"} {
			if d.Secrets[m]["k"] != "s3cret" {
				t.Errorf("%s was called with %v", m, d.Secrets[m])
			}
		}
		for _, n := range []string{"w1", "w2", "w3"} {
			if n != node {
				testcluster.SetPower(w, n, true)
			}
		}
		time.Sleep(time.Minute)
		testcluster.AwaitMounted(w, time.Second, "v", node)
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		testcluster.AwaitMounted(w, 30*time.Second, "v", "")
	})
}

// F110: a node with the taint out-of-service loses its volumes at once. A node that never stops its
// pods by itself loses them only that way.
func TestNodeOutOfService(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		testcluster.Update(w, node, func(n *corev1.Node) { n.Annotations[api.AnnotationFencesAfter] = "0" })
		testcluster.SetPower(w, node, false)
		time.Sleep(10 * time.Minute)       // virtual time: it stays so
		if p := w.LivePods(); len(p) > 0 { // that of the lost node is being deleted
			t.Fatalf("it moved: %v", p)
		}
		began := time.Now()
		testcluster.Update(w, node, func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeOutOfService,
				Effect: corev1.TaintEffectNoExecute})
		})
		w.EventuallyWithin(5*time.Second, "the pod elsewhere", func() error {
			p := w.LivePods()
			if len(p) != 1 || p[0].Spec.NodeName == node || !api.IsPodReady(p[0]) {
				return errors.New("not yet")
			}
			return nil
		})
		testcluster.AwaitMounted(w, 5*time.Second, "v", w.LivePods()[0].Spec.NodeName)
		t.Logf("moved after %s", time.Since(began))
	})
}

// F110: an event of the waiting pod names the holder of the volume.
func TestMultiAttachIsRefused(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.CreateObject(testcluster.NewClaimPod("late", other, "data-db-0"))
		w.AwaitEventContaining("FailedAttachVolume",
			fmt.Sprintf(`Multi-Attach error for volume "v": its access modes let one node have it, and node %s holds `+
				`it for pod default/db-0: it is released when that pod has ended`, node))
		d.Change(func() { d.Unmounts = false })
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		w.AwaitEventContaining("FailedAttachVolume", fmt.Sprintf("and node %s has not unmounted it yet", node))
		time.Sleep(10 * time.Minute) // it connects and reports that it uses the volume
		testcluster.AwaitMounted(w, time.Second, "v", node)
		d.Change(func() { d.Unmounts = true })
		testcluster.AwaitMounted(w, 10*time.Second, "v", other)
	})
}

// F110: a backup in which a pod waited for a volume is restored after the holder has changed. The
// node that reports the volume gets it, and the attachment of the backup is deleted without a
// driver call. The events of waiting pods name the holder.
func TestVolumesStayWithWhoHasThemAfterARestore(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
		w.CreateObject(testcluster.NewClaimPod("late", other, "data-db-0"))
		w.AwaitEventContaining("FailedAttachVolume", "for pod default/db-0: it is ")
		d.Change(func() { d.Dead[node], d.Dead[other] = true, true }) // they are not connected
		v, here := "v", api.AttachmentName("v", testcluster.DiskDriver, node)
		for _, n := range []string{node, other} {
			testcluster.Update(w, n, func(n *corev1.Node) {
				metav1.SetMetaDataAnnotation(&n.ObjectMeta, api.AnnotationUnconfirmed, "")
			})
		}
		time.Sleep(time.Second) // virtual time: the controller has observed it
		w.EventuallyWithin(30*time.Second, "the store of the backup", func() error {
			for _, n := range []string{node, other} {
				n, err := client.Get[*corev1.Node](w.Ctx, w.Admin, "", n)
				if err != nil {
					return err
				}
				n = n.DeepCopy()
				n.Status.VolumesAttached = nil
				if _, err := client.UpdateStatus(w.Ctx, w.Admin, n); err != nil {
					return err
				}
			}
			a, err := client.Get[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "", here)
			if err != nil {
				return err
			}
			a = a.DeepCopy()
			a.Finalizers = nil
			if _, err := client.Update(w.Ctx, w.Admin, a); err != nil {
				return err
			}
			_, err = client.Create(w.Ctx, w.Admin,
				&storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: api.AttachmentName("v",
					testcluster.DiskDriver, other)},
					Spec: storagev1.VolumeAttachmentSpec{Attacher: testcluster.DiskDriver, NodeName: other,
						Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &v}}})
			if err == nil {
				err = client.Delete[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "", here, metav1.DeleteOptions{})
			}
			return err
		})
		w.AwaitEventContaining("FailedAttachVolume", "kubectl delete node "+other)
		w.AwaitEventContaining("FailedAttachVolume", "kubectl delete node "+node)
		for _, n := range []string{other, node} {
			d.Change(func() { d.Dead[n] = false })
			time.Sleep(10 * time.Second) // virtual time: the node has reported its volumes
			testcluster.Update(w, n, func(n *corev1.Node) { delete(n.Annotations, api.AnnotationUnconfirmed) })
			time.Sleep(10 * time.Second)
		}
		testcluster.AwaitMounted(w, time.Minute, "v", node)
		w.AwaitEventContaining("FailedAttachVolume",
			fmt.Sprintf("node %s holds it for pod default/db-0: it is released when that pod has ended", node))
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		testcluster.AwaitMounted(w, time.Minute, "v", other)
	})
}

// F110: after a restore, a volume without a known holder is given to no node for a while. A node
// that joined after the backup may have it, and stops its pods within that time if it cannot
// connect. Events of the pods report this. Then the volume is treated like any other.
func TestVolumesWaitForNodesThatAreNotKnown(t *testing.T) {
	testcluster.RunAttached(t, testcluster.Options{}, func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
		testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
		testcluster.AwaitMounted(w, time.Minute, "v", "")
		testcluster.Update(w, "v", func(v *corev1.PersistentVolume) {
			metav1.SetMetaDataAnnotation(&v.ObjectMeta, api.AnnotationUnconfirmed, "")
		})
		time.Sleep(time.Second) // virtual time: the controller has observed it
		w.CreateObject(testcluster.NewClaimPod("late", node, "data-db-0"))
		w.AwaitEventContaining("FailedAttachVolume", "a node that joined after the backup may have the volume mounted")
		time.Sleep(50 * time.Second)
		d.Change(func() {
			if at := d.PublishedAt["v"]; at != "" {
				t.Errorf("on %s while such a node may have it", at)
			}
		})
		testcluster.AwaitMounted(w, 20*time.Second, "v", node)
		if v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", "v"); err != nil || api.IsUnconfirmed(v) {
			t.Errorf("afterwards it has the mark: %v, error %v", v.Annotations, err)
		}
	})
}

// F110: after a restore, a single-pod volume that is not attached has the restore mark until all
// nodes have reported and pods that the store lacks have ended. An event of its pod names the node
// for which it waits.
func TestVolumesOfOnePodWaitForNodes(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true,
			Resync: time.Minute}, NoMutationGuard: true})
		testcluster.AddDisks(w, "w1", "w2")
		modes, small := []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod},
			corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "share",
			Annotations: map[string]string{api.AnnotationUnconfirmed: ""}}}
		pv.Spec = corev1.PersistentVolumeSpec{AccessModes: modes, Capacity: small,
			ClaimRef: &corev1.ObjectReference{Namespace: "default", Name: "sole"}}
		pv.Spec.NFS = &corev1.NFSVolumeSource{Server: "192.0.2.1", Path: "/a"}
		none := ""
		claim := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "sole"}}
		claim.Spec = corev1.PersistentVolumeClaimSpec{AccessModes: modes, StorageClassName: &none, VolumeName: "share",
			Resources: corev1.VolumeResourceRequirements{Requests: small}}
		tells := func(unheard bool, list string) {
			testcluster.Update(w, "w2", func(n *corev1.Node) {
				n.Annotations[api.AnnotationClaimsHeld] = list
				if delete(n.Annotations, api.AnnotationUnconfirmed); unheard {
					n.Annotations[api.AnnotationUnconfirmed] = ""
				}
			})
		}
		marked := func(want bool) {
			t.Helper()
			w.EventuallyWithin(10*time.Second, fmt.Sprint("the mark: ", want), func() error {
				v, err := client.Get[*corev1.PersistentVolume](w.Ctx, w.Admin, "", "share")
				if err == nil && api.IsUnconfirmed(v) != want {
					err = fmt.Errorf("it has %v", v.Annotations)
				}
				return err
			})
		}
		tells(true, "[]")
		w.CreateObject(pv)
		w.CreateObject(claim)
		w.CreateObject(testcluster.NewClaimPod("late", "w1", "sole"))
		w.AwaitEventContaining("FailedAttachVolume",
			`volume "share" is for a single pod, and node w2 has not reported since a backup was restored`)
		time.Sleep(2 * time.Minute) // of the bubble: the time of nodes that are not known is over
		marked(true)
		tells(false, `[{"pod":"gone","claim":"former","volume":"share"}]`)
		w.AwaitEventContaining("FailedAttachVolume", "node w2 holds it for a deleted pod (uid gone)")
		marked(true)
		tells(false, "[]")
		marked(false)
	})
}

// F110: an iSCSI disk is attached to one node at a time too, although no driver is called. Events
// of other pods name the holder, and a node that loses power is fenced before the disk moves.
func TestDisksOfTargetsMove(t *testing.T) {
	testcluster.RunAttachedOf(t, testcluster.Options{}, true,
		func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
			a, err := client.Get[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "",
				api.AttachmentName("iqn.2026-01.example:v:3", api.ISCSIAttacher, node))
			if err != nil || !a.Status.Attached || *a.Spec.Source.PersistentVolumeName != "v" {
				t.Fatalf("%+v, %v", a, err)
			}
			other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
			w.CreateObject(testcluster.NewClaimPod("late", other, "data-db-0"))
			w.AwaitEventContaining("FailedAttachVolume",
				fmt.Sprintf(`Multi-Attach error for volume "v": its access modes let one node have it, and node %s `+
					`holds it for pod default/db-0`, node))
			d.Change(func() { d.Unmounts = false })
			testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
			w.AwaitEventContaining("FailedAttachVolume", fmt.Sprintf("and node %s has not unmounted it yet", node))
			time.Sleep(10 * time.Minute) // virtual time: it stays so
			testcluster.AwaitMounted(w, time.Second, "v", node)
			testcluster.SetPower(w, node, false)
			w.EventuallyWithin(time.Minute, "the volume elsewhere", func() error {
				d.Mu.Lock()
				defer d.Mu.Unlock()
				if !d.Mounted["v"][other] {
					return errors.New("not yet")
				}
				return nil
			})
			testcluster.AwaitMounted(w, 10*time.Second, "v", other)
			d.Change(func() { d.Unmounts = true })
			if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "late",
				metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
				t.Fatal(err)
			}
			testcluster.AwaitMounted(w, 30*time.Second, "v", "")
		})
}

// F110: PersistentVolumes of one disk, with any portals of its target and any case of its name,
// count as one volume. A pod on another node waits, and its event names both volumes. A pod on the
// same node gets the disk. The node keeps it until both pods are gone.
func TestVolumesThatShowTheSame(t *testing.T) {
	for _, iscsi := range []bool{false, true} {
		t.Run(fmt.Sprintf("iscsi=%v", iscsi), func(t *testing.T) {
			testcluster.RunAttachedOf(t, testcluster.Options{}, iscsi,
				func(w *testcluster.Cluster, d *testcluster.Disks, node string) {
					testcluster.CreateDiskOf(w, "v2", "v", "192.0.2.2:3261", "192.0.2.1")
					again := testcluster.NewClaim("again", "1Gi")
					again.Spec.VolumeName = "v2"
					w.CreateObject(again)
					w.AwaitBound("again")
					other := map[string]string{"w1": "w2", "w2": "w3", "w3": "w1"}[node]
					w.CreateObject(testcluster.NewClaimPod("late", other, "again"))
					what := map[bool]string{false: "volume v of CSI driver disk.example",
						true: "iSCSI disk iqn.2026-01.example:v:3"}[iscsi]
					says := fmt.Sprintf(`Multi-Attach error for volume "v2": it has the same storage as `+
						`volume "v" (%s), `+
						`its access modes let one node have it, and node %s holds it for pod default/db-0: it is `+
						`released when that pod has ended`, what, node)
					w.AwaitEventContaining("FailedAttachVolume", says)
					// A pod that runs before the controller has processed its volume gets no event.
					w.Nodes.Mark(w.Nodes.Held, "beside", true)
					beside := testcluster.NewClaimPod("beside", node, "again")
					beside.Labels = map[string]string{"app": "beside"}
					w.CreateObject(beside)
					w.AwaitEventContaining("SuccessfulAttachVolume", `succeeded for volume "v2"`)
					testcluster.Update(w, "db", func(s *appsv1.StatefulSet) { s.Spec.Replicas = new(int32) })
					w.AwaitEventContaining("FailedAttachVolume",
						fmt.Sprintf(`Multi-Attach error for volume "v2": its access modes let one node have it, and `+
							`node %s holds it for pod default/beside`, node))
					time.Sleep(10 * time.Minute) // virtual time: it stays so
					testcluster.AwaitMounted(w, time.Second, "v", node)
					for _, p := range []string{"beside", "late"} {
						if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", p,
							metav1.DeleteOptions{GracePeriodSeconds: new(int64)}); err != nil {
							t.Fatal(err)
						}
						testcluster.AwaitMounted(w, 30*time.Second, "v", map[string]string{"beside": other}[p])
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
	for _, step := range []string{"create volumeattachments", "update volumeattachments",
		"call ControllerPublishVolume", "update volumeattachments/status", "update nodes/status"} {
		stepDies(t, step, true)
	}
	for _, step := range []string{"update nodes/status", "delete volumeattachments", "call ControllerUnpublishVolume",
		"update volumeattachments"} {
		stepDies(t, step, false)
	}
}

func stepDies(t *testing.T, step string, up bool) {
	t.Helper()
	t.Run(fmt.Sprintf("%s %v", step, up), func(t *testing.T) {
		virtual.Test(t, func(t *testing.T) {
			b := &dying{died: make(chan struct{}, 1)}
			settings := engine.Options{OwnIdentity: true, Resync: time.Minute}
			w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
				WrapBackend: func(real api.Backend) api.Backend { b.Backend = real; return b }})
			stop := w.Lead(settings)
			defer func() { stop() }()
			w.AddNode("w1")
			w.AddNode("w2")
			w.AwaitUsableNodes(2)
			w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
			d := testcluster.AddDisks(w, "w1", "w2")
			d.Hook = b.kill
			testcluster.CreateDisk(w, "v")
			w.CreateObject(testcluster.NewClaim("data", "1Gi"))
			w.AwaitBound("data")
			arm := func() { b.mu.Lock(); b.at = step; b.mu.Unlock() }
			await := func() {
				<-b.died
				stop()
				stop = w.Lead(settings)
			}
			if up {
				arm()
			}
			w.CreateObject(testcluster.NewClaimPod("a", "w1", "data"))
			if up {
				await()
			}
			testcluster.AwaitMounted(w, 3*time.Minute, "v", "w1")
			if !up {
				arm()
			}
			w.CreateObject(testcluster.NewClaimPod("b", "w2", "data"))
			if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "a", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			if !up {
				await()
			}
			testcluster.AwaitMounted(w, 3*time.Minute, "v", "w2")
			if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", "b", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			testcluster.AwaitMounted(w, 3*time.Minute, "v", "")
			testcluster.CheckDisks(w)
		})
	})
}

// F110: regardless of lost calls and crashes, no volume is attached to two nodes through either of
// its PersistentVolumes. At the end each volume is where its pod is.
func TestAttachingUnderFailures(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true,
			ChangeController: testcluster.FailReconciles("attachdetach-controller", 3, 2*time.Millisecond)})
		settings := engine.Options{Resync: time.Second}
		stop := w.Lead(settings)
		defer func() { stop() }()
		for _, n := range []string{"w1", "w2"} {
			w.AddNode(n)
		}
		w.AwaitUsableNodes(2)
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
		d := testcluster.AddDisks(w, "w1", "w2")
		d.Change(func() { d.Flaky = rand.New(rand.NewPCG(7, 8)) })
		testcluster.CreateDisk(w, "v")
		w.CreateObject(testcluster.NewClaim("data", "1Gi"))
		w.AwaitBound("data")
		testcluster.CreateDiskOf(w, "v2", "v")
		w.CreateObject(testcluster.NewClaim("data2", "1Gi"))
		w.AwaitBound("data2")
		r := rand.New(rand.NewPCG(3, 4))
		last := ""
		for i := range 30 {
			name := fmt.Sprint("p", i)
			node := fmt.Sprint("w", 1+r.IntN(2))
			w.CreateObject(testcluster.NewClaimPod(name, node, []string{"data", "data2"}[r.IntN(2)]))
			if last != "" {
				if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", last, metav1.DeleteOptions{}); err !=
					nil {
					t.Fatal(err)
				}
			}
			last = name
			time.Sleep(time.Duration(r.IntN(3000)) * time.Millisecond)
			if i%7 == 6 {
				stop()
				stop = w.Lead(settings)
			}
			if i == 29 {
				d.Change(func() { d.Flaky = nil })
				testcluster.AwaitMounted(w, 5*time.Minute, "v", node)
			}
		}
		testcluster.CheckDisks(w)
		if err := client.Delete[*corev1.Pod](w.Ctx, w.Admin, "default", last, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		testcluster.AwaitMounted(w, 5*time.Minute, "v", "")
		testcluster.CheckDisks(w)
	})
}
