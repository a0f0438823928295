package controllers_test

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
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/volumeattach"
	"keelson.dev/keelson/internal/virtual"
)

// afterNodeDeleted runs f in a cluster in which node w1 reported a fence and mounts volume v, and its
// Node was deleted. The controller leads since the deletion and has never observed the Node. Pod b waits
// on node w2 for the volume.
func afterNodeDeleted(t *testing.T, fence string, f func(w *world, d *disks, attachment string)) {
	t.Helper()
	virtual.Test(t, func(t *testing.T) {
		w := newWorld(t, options{quiet: true})
		engine := controllers.Options{Resync: time.Minute}
		stop := w.lead(engine)
		for _, n := range []string{"w1", "w2"} {
			w.node(n)
		}
		w.usable(2)
		w.create(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "key"}})
		d := w.disksOn("w1", "w2")
		w.disk("v")
		w.create(claim("data", "1Gi"))
		w.boundTo("data")
		w.create(user("a", "w1", "data"))
		w.mountedOn(time.Minute, "v", "w1")
		attachment := api.AttachmentName("v", diskDriver, "w1")
		keeps := func(want string) {
			w.within(time.Minute, "attachment with fence "+want, func() error {
				a, err := client.Get[*storagev1.VolumeAttachment](w.ctx, w.admin, "", attachment)
				if err == nil && a.Annotations[api.AnnotationNodeFencesAfter] != want {
					err = fmt.Errorf("%v", a.Annotations)
				}
				return err
			})
		}
		keeps("20")
		update(w, "w1", func(n *corev1.Node) { n.Annotations[api.AnnotationFencesAfter] = fence })
		keeps(fence)
		d.set(func() { d.dead["w1"] = true }) // the node is partitioned: its volume stays mounted
		stop()
		if err := client.Delete[*corev1.Node](w.ctx, w.admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.all = slices.DeleteFunc(w.all, func(c *controllers.Controller) bool { return c.Name == "attachdetach-controller" })
		w.all = append(w.all, volumeattach.New(w.deps, w.drivers))
		w.lead(engine)
		w.create(user("b", "w2", "data"))
		f(w, d, attachment)
		w.nothingWrong()
	})
}

// F110: the fence of a node outlives its Node, on the node's attachments. The next leader attaches
// the volumes to another node when that time has passed, and not before.
func TestVolumesOfADeletedNodeMoveAfterItsFence(t *testing.T) {
	afterNodeDeleted(t, "300", func(w *world, d *disks, attachment string) {
		w.eventWith("FailedAttachVolume", "node w1, whose Node was deleted, may have it mounted, and loses it in ")
		time.Sleep(299 * time.Second) // of the bubble
		w.mountedOn(time.Second, "v", "w1")
		d.set(func() { delete(d.mounted["v"], "w1") }) // its agent stops the pod
		w.mountedOn(30*time.Second, "v", "w2")
	})
}

// F110: if the agent of a deleted Node never stops pods by itself, its volumes stay attached until
// a user deletes the attachment. The event of the waiting pod explains that.
func TestVolumesOfADeletedNodeThatNeverFencesStay(t *testing.T) {
	afterNodeDeleted(t, "0", func(w *world, d *disks, attachment string) {
		w.eventWith("FailedAttachVolume", "may have it mounted for ever, since its agent has --fence-after=0 "+
			"(if its machine is gone for good: kubectl delete volumeattachment "+attachment+")")
		time.Sleep(time.Hour) // of the bubble
		w.mountedOn(time.Second, "v", "w1")
		d.set(func() { delete(d.mounted["v"], "w1") }) // the machine no longer exists
		if err := client.Delete[*storagev1.VolumeAttachment](w.ctx, w.admin, "", attachment, metav1.DeleteOptions{}); err != nil {
			w.t.Fatal(err)
		}
		w.mountedOn(30*time.Second, "v", "w2")
	})
}
