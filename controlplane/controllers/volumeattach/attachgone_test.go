package volumeattach_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/controlplane/controllers/volumeattach"
	"keelson.dev/keelson/internal/virtual"
)

// afterNodeDeleted runs f in a cluster in which node w1 reported a fence and mounts volume v, and its
// Node was deleted. The controller leads since the deletion and has never observed the Node. Pod b waits
// on node w2 for the volume.
func afterNodeDeleted(
	t *testing.T, fence string, f func(w *testcluster.Cluster, d *testcluster.Disks, attachment string),
) {
	t.Helper()
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
		settings := engine.Options{Resync: time.Minute}
		stop := w.Lead(settings)
		for _, n := range []string{"w1", "w2"} {
			w.AddNode(n)
		}
		w.AwaitUsableNodes(2)
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
		d := testcluster.AddDisks(w, "w1", "w2")
		testcluster.CreateDisk(w, "v")
		w.CreateObject(testcluster.NewClaim("data", "1Gi"))
		w.AwaitBound("data")
		w.CreateObject(testcluster.NewClaimPod("a", "w1", "data"))
		testcluster.AwaitMounted(w, time.Minute, "v", "w1")
		attachment := api.AttachmentName("v", testcluster.DiskDriver, "w1")
		keeps := func(want string) {
			w.EventuallyWithin(time.Minute, "attachment with fence "+want, func() error {
				a, err := client.Get[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "", attachment)
				if err == nil && a.Annotations[api.AnnotationNodeFencesAfter] != want {
					err = fmt.Errorf("%v", a.Annotations)
				}
				return err
			})
		}
		keeps("20")
		testcluster.Update(w, "w1", func(n *corev1.Node) { n.Annotations[api.AnnotationFencesAfter] = fence })
		keeps(fence)
		d.Change(func() { d.Dead["w1"] = true }) // the node is partitioned: its volume stays mounted
		stop()
		if err := client.Delete[*corev1.Node](w.Ctx, w.Admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Controllers = slices.DeleteFunc(w.Controllers, func(c *engine.Descriptor) bool {
			return c.Name == "attachdetach-controller"
		})
		w.Controllers = append(w.Controllers, volumeattach.New(w.Deps, w.Drivers))
		w.Lead(settings)
		w.CreateObject(testcluster.NewClaimPod("b", "w2", "data"))
		f(w, d, attachment)
		testcluster.CheckDisks(w)
	})
}

// F110: the fence of a node outlives its Node, on the node's attachments. The next leader attaches
// the volumes to another node when that time has passed, and not before.
func TestVolumesOfADeletedNodeMoveAfterItsFence(t *testing.T) {
	afterNodeDeleted(t, "300", func(w *testcluster.Cluster, d *testcluster.Disks, attachment string) {
		w.AwaitEventContaining("FailedAttachVolume",
			"node w1, whose Node was deleted, may have it mounted until it is fenced, in ")
		time.Sleep(299 * time.Second) // of the bubble
		testcluster.AwaitMounted(w, time.Second, "v", "w1")
		d.Change(func() { delete(d.Mounted["v"], "w1") }) // its agent stops the pod
		testcluster.AwaitMounted(w, 30*time.Second, "v", "w2")
	})
}

// F110: if the agent of a deleted Node never stops pods by itself, its volumes stay attached until
// a user deletes the attachment. The event of the waiting pod explains that.
func TestVolumesOfADeletedNodeThatNeverFencesStay(t *testing.T) {
	afterNodeDeleted(t, "0", func(w *testcluster.Cluster, d *testcluster.Disks, attachment string) {
		w.AwaitEventContaining("FailedAttachVolume",
			"may have it mounted without a time limit, because its agent has --fence-after=0 "+
				"(if its machine no longer exists: kubectl delete volumeattachment "+attachment+")")
		time.Sleep(time.Hour) // of the bubble
		testcluster.AwaitMounted(w, time.Second, "v", "w1")
		d.Change(func() { delete(d.Mounted["v"], "w1") }) // the machine no longer exists
		if err := client.Delete[*storagev1.VolumeAttachment](w.Ctx, w.Admin, "", attachment,
			metav1.DeleteOptions{}); err != nil {
			w.T.Fatal(err)
		}
		testcluster.AwaitMounted(w, 30*time.Second, "v", "w2")
	})
}
