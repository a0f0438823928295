package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/test/testenv"
)

func fetchBody(c *http.Client, url string) (string, error) {
	resp, err := c.Get(url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return string(body), err
}

// F68, P20: a rolling update loses no request to the Service.
func TestRollingUpdateLosesNothing(t *testing.T) {
	w := newNamespace(t)
	svc := w.createService(webService("web", v1.ServiceTypeClusterIP))
	w.createWeb(webDeployment("web", 3))
	w.awaitReplicas("web", 3)
	url := "http://" + svc.Spec.ClusterIP + "/"
	client := testenv.PatientHTTP(testenv.Host(t, "w1"))
	testenv.Eventually(t, soon, func() error { _, err := fetchBody(client, url); return err })

	ctx, stop := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var mu sync.Mutex
	versions, failures := map[string]int{}, []error{}
	for range 4 {
		wg.Go(func() {
			for ctx.Err() == nil {
				body, err := fetchBody(client, url)
				mu.Lock()
				if err != nil {
					failures = append(failures, err)
				}
				for _, v := range []string{"v1", "v2"} {
					if strings.Contains(body, v) {
						versions[v]++
					}
				}
				mu.Unlock()
			}
		})
	}
	testenv.Kctl(t, "-n", w.ns, "set", "image", "deployment/web", "main=keelson.dev/hello:v2")
	testenv.Kctl(t, "-n", w.ns, "rollout", "status", "deployment/web", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		if n := len(w.livingPods("web")); n != 3 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	stop()
	wg.Wait()
	if len(failures) > 0 {
		t.Errorf("%d of %d requests failed; first: %v", len(failures),
			versions["v1"]+versions["v2"]+len(failures), failures[0])
	}
	if versions["v1"] == 0 || versions["v2"] == 0 {
		t.Errorf("responses by version: %v, want both", versions)
	}
	t.Logf("requests answered during the update: %v", versions)
	// F67: the old ReplicaSet stays for history; undo brings v1 back.
	testenv.Kctl(t, "-n", w.ns, "rollout", "undo", "deployment/web")
	testenv.Kctl(t, "-n", w.ns, "rollout", "status", "deployment/web", "--timeout=180s")
	testenv.Eventually(t, soon, func() error {
		body, err := fetchBody(client, url)
		if err == nil && !strings.Contains(body, "v1") {
			err = fmt.Errorf("after undo: %s", body)
		}
		return err
	})
}

// F59 F60 F61: scale up and down; a deleted pod is replaced.
func TestScale(t *testing.T) {
	w := newNamespace(t)
	w.createWeb(webDeployment("web", 1))
	w.awaitReplicas("web", 1)
	testenv.Kctl(t, "-n", w.ns, "scale", "deployment/web", "--replicas=4")
	pods := w.awaitReplicas("web", 4)
	if err := w.cs.CoreV1().Pods(w.ns).Delete(context.Background(), pods[0].Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.awaitReplicas("web", 4)
	testenv.Kctl(t, "-n", w.ns, "scale", "deployment/web", "--replicas=1")
	w.awaitReplicas("web", 1)
	testenv.Eventually(t, soon, func() error {
		d, err := w.cs.AppsV1().Deployments(w.ns).Get(context.Background(), "web", metav1.GetOptions{})
		if err == nil && (d.Status.Replicas != 1 || d.Status.AvailableReplicas != 1) {
			err = fmt.Errorf("status %+v", d.Status)
		}
		return err
	})
}

// F70 F71: deleting a Deployment takes its pods with it, orphaning leaves them.
func TestCascadeAndOrphan(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	w.createWeb(webDeployment("gone", 2))
	w.createWeb(webDeployment("kept", 2))
	w.awaitReplicas("gone", 2)
	w.awaitReplicas("kept", 2)
	if err := w.cs.AppsV1().Deployments(w.ns).Delete(ctx, "gone", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := w.cs.AppsV1().Deployments(w.ns).Delete(ctx, "kept",
		metav1.DeleteOptions{PropagationPolicy: new(metav1.DeletePropagationOrphan)}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		rs, err := w.cs.AppsV1().ReplicaSets(w.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=gone"})
		if err != nil {
			return err
		}
		all, err := w.cs.CoreV1().Pods(w.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=gone"})
		if err == nil && len(rs.Items)+len(all.Items) > 0 {
			err = fmt.Errorf("%d replica sets and %d pods left", len(rs.Items), len(all.Items))
		}
		return err
	})
	testenv.Eventually(t, soon, func() error {
		_, err := w.cs.AppsV1().Deployments(w.ns).Get(ctx, "kept", metav1.GetOptions{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("deployment kept: %v", err)
		}
		rs, err := w.cs.AppsV1().ReplicaSets(w.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=kept"})
		if err != nil || len(rs.Items) != 1 || len(rs.Items[0].OwnerReferences) != 0 {
			return fmt.Errorf("orphaned replica sets: %v, %+v", err, rs.Items)
		}
		return nil
	})
	w.awaitReplicas("kept", 2)
}

// F104: a container that exceeds its memory limit is killed and reports it.
func TestOutOfMemory(t *testing.T) {
	w := newNamespace(t)
	p := newPod("hog", tools, "sh", "-c", "sleep 0.2; exec tail /dev/zero")
	p.Spec.RestartPolicy = v1.RestartPolicyNever
	p.Spec.Containers[0].Resources.Limits = v1.ResourceList{v1.ResourceMemory: resource.MustParse("32Mi")}
	w.createPod(p)
	got := w.awaitPod("hog", func(p *v1.Pod) error {
		if p.Status.Phase != v1.PodFailed {
			return fmt.Errorf("phase %s", p.Status.Phase)
		}
		return nil
	})
	end := got.Status.ContainerStatuses[0].State.Terminated
	if end == nil || end.Reason != "OOMKilled" || end.ExitCode != 137 {
		t.Errorf("ended as %+v, want OOMKilled with 137", end)
	}
}

// F126, P23: a container that keeps failing backs off, with its reason and last end in the status.
func TestCrashLoop(t *testing.T) {
	w := newNamespace(t)
	w.createPod(newPod("crash", tools, "sh", "-c", "echo about to fail; exit 3"))
	got := w.awaitPod("crash", func(p *v1.Pod) error {
		if len(p.Status.ContainerStatuses) == 1 {
			s := p.Status.ContainerStatuses[0]
			if s.RestartCount >= 2 && s.State.Waiting != nil && s.State.Waiting.Reason == "CrashLoopBackOff" {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.Status.ContainerStatuses)
	})
	last := got.Status.ContainerStatuses[0].LastTerminationState.Terminated
	if last == nil || last.ExitCode != 3 || last.Reason != "Error" {
		t.Errorf("last end: %+v, want Error with 3", last)
	}
	if out := testenv.Kctl(t, "-n", w.ns, "logs", "crash", "--previous"); !strings.Contains(out, "about to fail") {
		t.Errorf("logs of the previous container: %q", out)
	}
	w.awaitEvent("crash", "BackOff", "restarting failed container")
}

// F106: an image that is not there.
func TestMissingImage(t *testing.T) {
	w := newNamespace(t)
	w.createPod(newPod("absent", "10.89.0.5:5000/no-such:v1"))
	w.awaitPod("absent", func(p *v1.Pod) error {
		if len(p.Status.ContainerStatuses) == 1 {
			if s := p.Status.ContainerStatuses[0].State.Waiting; s != nil && s.Reason == "ImagePullBackOff" {
				return nil
			}
		}
		return fmt.Errorf("%+v", p.Status.ContainerStatuses)
	})
	w.awaitEvent("absent", "Failed", "no-such:v1")
}

// F106: a pull over the network from the lab's registry.
func TestPullFromRegistry(t *testing.T) {
	w := newNamespace(t)
	p := newPod("pulled", "10.89.0.5:5000/tools:v1", "sleep", "1000000")
	p.Spec.Containers[0].ImagePullPolicy = v1.PullAlways
	w.createPod(p)
	got := w.awaitPod("pulled", requireReady)
	if id := got.Status.ContainerStatuses[0].ImageID; !strings.Contains(id, "sha256:") {
		t.Errorf("image id %q", id)
	}
	w.awaitEvent("pulled", "Pulled", "uccessfully pulled image")
}

// F112 F113: a pod that is not ready takes no traffic and is not restarted.
func TestReadinessGatesService(t *testing.T) {
	w := newNamespace(t)
	d := webDeployment("web", 1)
	d.Spec.Template.Spec.Containers[0].Image = tools
	d.Spec.Template.Spec.Containers[0].Command = []string{"sh", "-c",
		"mkdir /www; echo here > /www/index.html; exec busybox httpd -f -p 8080 -h /www"}
	d.Spec.Template.Spec.Containers[0].ReadinessProbe = &v1.Probe{
		ProbeHandler:  v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"test", "-f", "/ready"}}},
		PeriodSeconds: 1, FailureThreshold: 1,
	}
	svc := w.createService(webService("web", v1.ServiceTypeClusterIP))
	w.createWeb(d)
	var name string
	testenv.Eventually(t, soon, func() error {
		pods := w.livingPods("web")
		if len(pods) != 1 || pods[0].Status.Phase != v1.PodRunning {
			return fmt.Errorf("%d pods, want one that runs", len(pods))
		}
		name = pods[0].Name
		return nil
	})
	client := testenv.HTTP(testenv.Host(t, "w2"))
	url := "http://" + svc.Spec.ClusterIP + "/"
	reachable := func(want bool) {
		t.Helper()
		testenv.Eventually(t, soon, func() error {
			if _, err := fetchBody(client, url); (err == nil) != want {
				return fmt.Errorf("reachable: %v (%v), want %v", err == nil, err, want)
			}
			return nil
		})
	}
	reachable(false)
	testenv.Kctl(t, "-n", w.ns, "exec", name, "--", "touch", "/ready")
	reachable(true)
	testenv.Kctl(t, "-n", w.ns, "exec", name, "--", "rm", "/ready")
	reachable(false)
	if n := w.getPod(name).Status.ContainerStatuses[0].RestartCount; n != 0 {
		t.Errorf("restarted %d times", n)
	}
}

// F80 F87 F126: a pod that fits no node reports the number of nodes per filter and reason.
func TestUnschedulableSaysWhy(t *testing.T) {
	w := newNamespace(t)
	p := sleeperPod("big")
	p.Spec.Containers[0].Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1000")}
	w.createPod(p)
	w.awaitEvent("big", "FailedScheduling", "0/3 nodes are available: 3 Insufficient cpu")
	w.awaitPod("big", func(p *v1.Pod) error {
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodScheduled && c.Status == v1.ConditionFalse && c.Reason == "Unschedulable" &&
				strings.Contains(c.Message, "Insufficient cpu") {
				return nil
			}
		}
		return fmt.Errorf("conditions %+v", p.Status.Conditions)
	})
}

// F124: of two updates from one state, one wins and the other is a conflict.
func TestStaleUpdate(t *testing.T) {
	w := newNamespace(t)
	ctx := context.Background()
	cm, err := w.cs.CoreV1().ConfigMaps(w.ns).Create(ctx, &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	first, second := cm.DeepCopy(), cm.DeepCopy()
	first.Data, second.Data = map[string]string{"a": "1"}, map[string]string{"a": "2"}
	if _, err := w.cs.CoreV1().ConfigMaps(w.ns).Update(ctx, first, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.cs.CoreV1().ConfigMaps(w.ns).Update(ctx, second,
		metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("the stale update: %v, want a conflict", err)
	}
	// Server-side apply by two managers: the second needs force.
	apply := func(manager, value string, force bool) error {
		body := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"d"},"data":{"a":%q}}`, value)
		_, err := w.cs.CoreV1().ConfigMaps(w.ns).Patch(ctx, "d", types.ApplyPatchType, []byte(body),
			metav1.PatchOptions{FieldManager: manager, Force: &force})
		return err
	}
	if err := errors.Join(apply("one", "1", false), apply("one", "1", false)); err != nil {
		t.Fatal(err)
	}
	if err := apply("two", "2", false); !apierrors.IsConflict(err) || !strings.Contains(err.Error(), "one") {
		t.Errorf("apply over another manager's field: %v, want a conflict that names it", err)
	}
	if err := apply("two", "2", true); err != nil {
		t.Error(err)
	}
}
