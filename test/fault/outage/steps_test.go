package outage

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/deploy/lab"
	"keelson.dev/keelson/test/bed"
)

// eachStep takes a volume through its life, and strikes at each of its steps before the driver makes the call; and another one,
// after it has, when the answer is under way: the pod gets the volume all the same, its data are kept for as long as there is a claim, and then nothing
// is left, neither an object nor a mount nor a volume. The journal tells whether it was ever in two places.
func (a attach) eachStep(fault string, strike func(node string)) {
	a.Helper()
	began := time.Now()
	for _, when := range []string{"before", "after"} {
		a.life(fault, when, strike)
	}
	a.Logf("%s killed before and after each step of a volume's life: nothing is left of two after %s", fault, time.Since(began).Round(10*time.Millisecond))
}

func (a attach) life(fault, when string, strike func(node string)) {
	a.Helper()
	ctx := context.Background()
	for _, dir := range []string{"hold", "held"} {
		if err := os.MkdirAll(filepath.Join(a.shared, dir), 0o755); err != nil {
			a.Fatal(err)
		}
	}
	for _, step := range []string{"CreateVolume", "ControllerPublishVolume", "NodeStageVolume", "NodePublishVolume", "ControllerExpandVolume", "NodeExpandVolume",
		"NodeUnpublishVolume", "NodeUnstageVolume", "ControllerUnpublishVolume", "DeleteVolume"} {
		if err := os.WriteFile(filepath.Join(a.shared, "hold", step), []byte(when), 0o600); err != nil {
			a.Fatal(err)
		}
	}
	at := func(step string) {
		a.Helper()
		a.strikeAt(fault+" "+when, step, strike)
	}
	class, name := "held", "held-"+when+"-"+fault
	claim, err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Create(ctx, &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: v1.PersistentVolumeClaimSpec{
		StorageClassName: &class, AccessModes: []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce},
		Resources: v1.VolumeResourceRequirements{Requests: v1.ResourceList{v1.ResourceStorage: resource.MustParse("8Mi")}}}}, metav1.CreateOptions{})
	if err != nil {
		a.Fatal(err)
	}
	volume := "held-pvc-" + string(claim.UID)
	if _, err := a.cs.CoreV1().Pods(a.ns).Create(ctx, user(name, name), metav1.CreateOptions{}); err != nil {
		a.Fatal(err)
	}
	at("CreateVolume")
	at("ControllerPublishVolume")
	at("NodeStageVolume")
	at("NodePublishVolume")
	a.running(name, "", soon)
	bed.Kctl(a, "-n", a.ns, "exec", name, "--", "sh", "-c", "echo kept > /data/file")
	a.grow(name, "16Mi", func() {
		at("ControllerExpandVolume")
		at("NodeExpandVolume")
	})
	if err := a.cs.CoreV1().Pods(a.ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	at("NodeUnpublishVolume")
	at("NodeUnstageVolume")
	at("ControllerUnpublishVolume")
	a.goneIs(name)
	if b, err := os.ReadFile(filepath.Join(a.shared, "volumes", volume, "data", "file")); err != nil || string(b) != "kept\n" {
		a.Errorf("%s killed: the volume of a claim that is there has %q, %v", fault, b, err)
	}
	if err := a.cs.CoreV1().PersistentVolumeClaims(a.ns).Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
		a.Fatal(err)
	}
	at("DeleteVolume")
	a.nothingOf(volume, string(claim.UID))
}

// grow has a claim that is in use grow, and waits until it has.
func (a attach) grow(claim, size string, meanwhile func()) {
	a.Helper()
	ctx, claims := context.Background(), a.cs.CoreV1().PersistentVolumeClaims(a.ns)
	if _, err := claims.Patch(ctx, claim, types.MergePatchType, []byte(`{"spec": {"resources": {"requests": {"storage": "`+size+`"}}}}`), metav1.PatchOptions{}); err != nil {
		a.Fatal(err)
	}
	meanwhile()
	bed.Eventually(a, soon, func() error {
		c, err := claims.Get(ctx, claim, metav1.GetOptions{})
		if err == nil && (c.Status.Capacity.Storage().String() != size || len(c.Status.Conditions) > 0) {
			err = fmt.Errorf("claim %s is %+v", claim, c.Status)
		}
		return err
	})
}

// strikeAt waits until the driver has made a call, and strikes before its answer goes out.
func (a attach) strikeAt(fault, step string, strike func(node string)) {
	a.Helper()
	held, node := filepath.Join(a.shared, "held", step), ""
	bed.Eventually(a, soon, func() error {
		b, err := os.ReadFile(held)
		if err == nil && len(b) == 0 {
			err = errors.New("nobody has it yet")
		}
		if err != nil {
			return fmt.Errorf("%s step %s: %w", fault, step, err)
		}
		node = string(b)
		return nil
	})
	strike(node)
	if err := os.Remove(held); err != nil {
		a.Fatal(err)
	}
}

// nothingOf waits until nobody knows of a volume any more.
func (a attach) nothingOf(volume, claim string) {
	a.Helper()
	ctx := context.Background()
	bed.Eventually(a, soon, func() error {
		if _, err := os.Stat(filepath.Join(a.shared, "volumes", volume)); !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("the driver has %s: %v", volume, err)
		}
		volumes, err := a.cs.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, v := range volumes.Items {
			if strings.Contains(v.Name, claim) {
				return fmt.Errorf("PersistentVolume %s is there: %+v", v.Name, v.Status)
			}
		}
		attachments, err := a.cs.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, x := range attachments.Items {
			if from := x.Spec.Source.PersistentVolumeName; from != nil && strings.Contains(*from, claim) {
				return fmt.Errorf("VolumeAttachment %s is there: %+v", x.Name, x.Status)
			}
		}
		nodes, err := a.cs.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range nodes.Items {
			if said := fmt.Sprint(n.Status.VolumesInUse, n.Status.VolumesAttached); strings.Contains(said, volume) {
				return fmt.Errorf("node %s speaks of it: %s", n.Name, said)
			}
		}
		return nil
	})
	for _, s := range bed.Lab().Status(ctx) {
		if s.Role != lab.RoleWorker || s.PID == 0 {
			continue
		}
		if out, err := s.Command(ctx, "cat", "/proc/self/mountinfo").Output(); err != nil || strings.Contains(string(out), claim) {
			a.Errorf("mounts of %s: %v %s", s.Name, err, out)
		}
	}
}

// killAgent kills the daemon of a host, and has it started again.
func (a attach) killAgent(node string) {
	a.Helper()
	if err := bed.Lab().KillDaemon(context.Background(), node); err != nil {
		a.Fatal(err)
	}
	if err := bed.Lab().RestartDaemon(context.Background(), node); err != nil {
		a.Fatal(err)
	}
}

// killDriver ends the driver's process on a node; another one is made.
func (a attach) killDriver(node string) {
	a.Helper()
	ctx, pods, now := context.Background(), a.cs.CoreV1().Pods(a.ns), int64(0)
	var list *v1.PodList
	bed.Eventually(a, soon, func() (err error) { // the one before may have been killed just now
		list, err = pods.List(ctx, metav1.ListOptions{LabelSelector: "app=driver", FieldSelector: "spec.nodeName=" + node})
		if err == nil && len(list.Items) == 0 {
			err = fmt.Errorf("no driver on %s", node)
		}
		return err
	})
	for _, p := range list.Items {
		if err := pods.Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
			a.Fatal(err)
		}
	}
}

func (a attach) killLeader(string) {
	a.Helper()
	name, _ := bed.Leader(a, soon)
	a.killAgent(name)
}
