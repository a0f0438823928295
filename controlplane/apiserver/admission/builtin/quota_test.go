package builtin_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
)

func quantities(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func newQuota(name string, pairs ...string) *corev1.ResourceQuota {
	return &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: corev1.ResourceQuotaSpec{Hard: quantities(pairs...)}}
}

// newPodWithCPU returns a pod with the CPU request.
func newPodWithCPU(name, cpu string) *corev1.Pod {
	p := apiservertest.NewPod(name)
	p.Spec.Containers[0].Name = "main"
	p.Spec.Containers[0].Resources.Requests = quantities("cpu", cpu)
	return p
}

// Requests above a quota are rejected with the messages of Kubernetes. Afterwards the status of
// the quota shows the admitted usage.
func TestQuotaIsEnforced(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.PipelineClient("admin")
	for _, q := range []*corev1.ResourceQuota{
		newQuota("numbers", "pods", "2", "configmaps", "4", "count/deployments.apps", "0", "services.nodeports", "1"),
		newQuota("compute", "requests.cpu", "1"),
		newQuota("storage", "requests.storage", "10Gi", "slow.storageclass.storage.k8s.io/persistentvolumeclaims", "0"),
		newQuota("devices", "gpu.example.com.deviceclass.resource.k8s.io/devices", "3"),
	} {
		r.Must(q)
	}
	// the namespace has kube-root-ca.crt only where its controller runs
	claim := func(name, size string, class *string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: class,
				Resources: corev1.VolumeResourceRequirements{Requests: quantities("storage", size)}}}
	}
	service := func(name string, ports ...int32) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort}}
		for _, p := range ports {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprint("p", p), Port: p})
		}
		return s
	}
	devices := func(name string, n int64) *resourcev1.ResourceClaim {
		return &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: resourcev1.ResourceClaimSpec{
				Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "r",
					Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu.example.com", Count: n}}}}}}
	}
	slow, none := "slow", ""
	for _, c := range []struct {
		what   string
		object api.Object
		want   string // "" = it is made
	}{
		{"the first pod", newPodWithCPU("a", "600m"), ""},
		{"too much", newPodWithCPU("b", "500m"),
			`pods "b" is forbidden: exceeded quota: compute, requested: requests.cpu=500m, used: requests.cpu=600m, ` +
				`limited: requests.cpu=1`},
		{"all that is left", newPodWithCPU("b", "400m"), ""},
		{"the third pod", newPodWithCPU("c", "0"),
			`pods "c" is forbidden: exceeded quota: numbers, requested: pods=1, used: pods=2, limited: pods=2`},
		{"nothing stated", apiservertest.NewPod("d"),
			`pods "d" is forbidden: failed quota: compute: must specify requests.cpu for: c`},
		{"none at all", aDeployment("x"), `deployments.apps "x" is forbidden: exceeded quota: numbers, requested: ` +
			`count/deployments.apps=1, used: count/deployments.apps=0, limited: count/deployments.apps=0`},
		{"a claim", claim("small", "6Gi", &none), ""},
		{"a large claim", claim("large", "5Gi", &none),
			`persistentvolumeclaims "large" is forbidden: exceeded quota: storage, requested: requests.storage=5Gi, ` +
				`used: requests.storage=6Gi, limited: requests.storage=10Gi`},
		{"of a class", claim("slow", "1Gi", &slow),
			`persistentvolumeclaims "slow" is forbidden: exceeded quota: storage, requested: ` +
				`slow.storageclass.storage.k8s.io/persistentvolumeclaims=1, used: ` +
				`slow.storageclass.storage.k8s.io/persistentvolumeclaims=0, limited: ` +
				`slow.storageclass.storage.k8s.io/persistentvolumeclaims=0`},
		{"devices", devices("two", 2), ""},
		{"more devices", devices("four", 2),
			`resourceclaims.resource.k8s.io "four" is forbidden: exceeded quota: devices, requested: ` +
				`gpu.example.com.deviceclass.resource.k8s.io/devices=2, used: ` +
				`gpu.example.com.deviceclass.resource.k8s.io/devices=2, limited: ` +
				`gpu.example.com.deviceclass.resource.k8s.io/devices=3`},
		{"a port", service("one", 1), ""},
		{"more ports", service("two", 1, 2), `services "two" is forbidden: exceeded quota: numbers, requested: ` +
			`services.nodeports=2, used: services.nodeports=1, limited: services.nodeports=1`},
	} {
		err := apiservertest.TryCreate(admin, c.object, false)
		if got := admissiontest.ErrorText(err); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
		if err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v is no 403", c.what, err)
		}
	}
	used := func(name string) string { return usedOfQuota(t, admin, name) }
	for name, want := range map[string]string{
		"numbers": "count/deployments.apps=0,pods=2,services.nodeports=1", "compute": "requests.cpu=1",
		"storage": "requests.storage=6Gi,slow.storageclass.storage.k8s.io/persistentvolumeclaims=0",
	} {
		if got := strings.Replace(used(name), "configmaps=0,", "", 1); got != want {
			t.Errorf("%s shows %s, want %s", name, got, want)
		}
	}
	checkQuotaRelease(t, admin, used)
}

// F110: a quota whose scope is a VolumeAttributesClass counts the claims that name the class,
// including claims that name it after their creation.
func TestQuotaOfVolumeAttributesClass(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.PipelineClient("admin")
	q := newQuota("gold", "persistentvolumeclaims", "1", "requests.storage", "5Gi")
	q.Spec.ScopeSelector = &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
		{ScopeName: corev1.ResourceQuotaScopeVolumeAttributesClass, Operator: corev1.ScopeSelectorOpIn,
			Values: []string{"gold"}}}}
	r.Must(q)
	for _, name := range []string{"a", "b"} {
		r.Must(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
				Resources:   corev1.VolumeResourceRequirements{Requests: quantities("storage", "2Gi")}}})
		c, err := client.Get[*corev1.PersistentVolumeClaim](t.Context(), admin, "default", name)
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		c.Status.Phase = corev1.ClaimBound // the class of a claim may change only then
		if _, err := client.UpdateStatus(t.Context(), admin, c); err != nil {
			t.Fatal(err)
		}
	}
	names := func(claim, class string) string {
		t.Helper()
		c, err := client.Get[*corev1.PersistentVolumeClaim](t.Context(), admin, "default", claim)
		if err != nil {
			t.Fatal(err)
		}
		c = c.DeepCopy()
		c.Spec.VolumeAttributesClassName = &class
		_, err = client.Update(t.Context(), admin, c)
		return admissiontest.ErrorText(err)
	}
	const full = `persistentvolumeclaims "b" is forbidden: exceeded quota: gold, requested: ` +
		`persistentvolumeclaims=1, ` +
		`used: persistentvolumeclaims=1, limited: persistentvolumeclaims=1`
	for _, c := range []struct{ claim, class, want string }{{"a", "gold", ""}, {"b", "gold", full}, {"b", "silver", ""},
		{"a", "silver", ""}, {"b", "gold", ""}} {
		if got := names(c.claim, c.class); got != c.want {
			t.Errorf("claim %s names %s: %s\nwant %s", c.claim, c.class, got, c.want)
		}
	}
}

// usedOfQuota returns the used amounts in the status of a quota.
func usedOfQuota(t *testing.T, c *client.Client, name string) string {
	t.Helper()
	q, err := client.Get[*corev1.ResourceQuota](t.Context(), c, "default", name)
	if err != nil {
		t.Fatal(err)
	}
	return quota.Format(q.Status.Used)
}

// checkQuotaRelease checks that the usage of a deleted, finished or evicted pod is released in the
// same commit. A dry run uses nothing and is rejected like a request. The existing pods are a, of
// 600m, and b, of 400m.
func checkQuotaRelease(t *testing.T, admin *client.Client, used func(name string) string) {
	t.Helper()
	pod, err := client.Get[*corev1.Pod](t.Context(), admin, "default", "a")
	if err != nil {
		t.Fatal(err)
	}
	ended := pod.DeepCopy()
	ended.Status.Phase = corev1.PodSucceeded
	if _, err := client.UpdateStatus(t.Context(), admin, ended); err != nil {
		t.Fatal(err)
	}
	if got := used("compute"); got != "requests.cpu=400m" {
		t.Errorf("after a pod has ended: %s", got)
	}
	if err := apiservertest.TryCreate(admin, newPodWithCPU("e", "600m"), true); err != nil ||
		used("compute") != "requests.cpu=400m" {
		t.Errorf("a dry run: %v, %s", err, used("compute"))
	}
	if err := apiservertest.TryCreate(admin, newPodWithCPU("e", "601m"), true); !apierrors.IsForbidden(err) {
		t.Errorf("a dry run of too much: %v", err)
	}
	evict := &api.Request{Verb: api.VerbCreate, Kind: admin.Kinds().ByType(pod), Subresource: "eviction",
		Namespace: "default", Name: "b",
		Object: &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b"}}}
	if _, err := admin.Do(t.Context(), evict); err != nil || used("compute") != "requests.cpu=0" {
		t.Errorf("after an eviction: %v, %s", err, used("compute"))
	}
	if err := client.Delete[*corev1.Pod](t.Context(), admin, "default", "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := used("numbers"); !strings.Contains(got, ",pods=0,") {
		t.Errorf("after all pods went: %s", got)
	}
}

// Concurrent writers through three replicas never exceed a quota, and its status equals the
// existing objects. Pods are deleted and finish, some requests are dry runs, and the quota is
// deleted, recreated and changed meanwhile.
func TestQuotaIsExact(t *testing.T) {
	for _, seed := range []uint64{7, rand.Uint64()} {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { quotaUnderLoad(t, seed) })
	}
}

func quotaUnderLoad(t *testing.T, seed uint64) {
	_, clients := apiservertest.StartPipelines(t)
	ctx := t.Context()
	before := newQuota("exact", "pods", "5", "requests.cpu", "2", "configmaps", "6", "count/pods", "7")
	if err := apiservertest.TryCreate(clients[1], before, false); err != nil {
		t.Fatal(err)
	}
	var writers, others sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for n := range 6 {
		writers.Go(func() {
			w := &quotaWriter{t: t, c: clients[n%3], rng: rand.New(rand.NewPCG(seed, uint64(n))),
				name: fmt.Sprint("w", n)}
			for range 40 {
				w.step(ctx)
			}
			mu.Lock()
			refused += w.refused
			mu.Unlock()
		})
	}
	stop := make(chan struct{})
	others.Go(func() { // another quota that comes and goes, counted by whoever writes next
		rng := rand.New(rand.NewPCG(seed, 99))
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			q := newQuota("moving", "pods", fmt.Sprint(3+rng.IntN(3)))
			if err := apiservertest.TryCreate(clients[i%3], q, false); err != nil && !apierrors.IsAlreadyExists(err) {
				t.Errorf("making a quota: %v", err)
			}
			if rng.IntN(3) > 0 {
				now, err := client.Get[*corev1.ResourceQuota](ctx, clients[i%3], "default", "moving")
				if err == nil {
					now = now.DeepCopy()
					now.Spec.Hard = quantities("pods", fmt.Sprint(3+rng.IntN(3)), "configmaps", "5")
					_, err = client.Update(ctx, clients[(i+1)%3], now)
				}
				if err != nil && !apierrors.IsConflict(err) {
					t.Errorf("changing a quota: %v", err)
				}
				continue
			}
			if err := client.Delete[*corev1.ResourceQuota](ctx, clients[i%3], "default", "moving",
				metav1.DeleteOptions{}); err != nil {
				t.Errorf("removing a quota: %v", err)
			}
		}
	})
	writers.Wait()
	close(stop)
	others.Wait()
	if refused == 0 {
		t.Error("the limit was never met")
	}
	for i, c := range clients {
		q, err := client.Get[*corev1.ResourceQuota](ctx, c, "default", "exact")
		if err != nil {
			t.Fatal(err)
		}
		want, err := quota.TotalUsage(&q.Spec, time.Now(), func(of schema.GroupResource) ([]api.Object, bool, error) {
			list, err := c.ListKind(ctx, c.Kinds().ByResource(of.WithVersion("v1")), "default")
			return list, true, err
		})
		if err != nil || !equality.Semantic.DeepEqual(want, q.Status.Used) {
			t.Errorf("replica %d: the quota shows %s, there is %s, %v", i, quota.Format(q.Status.Used),
				quota.Format(want), err)
		}
		for name, n := range want {
			if limit := q.Spec.Hard[name]; n.Cmp(limit) > 0 {
				t.Errorf("there is %s of %s, at most %s may be", n.String(), name, limit.String())
			}
		}
	}
}

// quotaWriter creates, finishes and deletes pods and config maps.
type quotaWriter struct {
	t       *testing.T
	c       *client.Client
	rng     *rand.Rand
	name    string
	n       int
	pods    []string
	maps    []string
	refused int
}

func (w *quotaWriter) step(ctx context.Context) {
	w.n++
	name := fmt.Sprintf("%s-%d", w.name, w.n)
	switch w.rng.IntN(7) {
	case 0, 1:
		if w.made(apiservertest.TryCreate(w.c, newPodWithCPU(name, []string{"100m", "500m", "1"}[w.rng.IntN(3)]),
			false)) {
			w.pods = append(w.pods, name)
		}
	case 2:
		if w.made(apiservertest.TryCreate(w.c,
			&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}, false)) {
			w.maps = append(w.maps, name)
		}
	case 3:
		w.made(apiservertest.TryCreate(w.c, newPodWithCPU(name, "1"), true))
	case 4:
		if len(w.pods) > 0 {
			w.end(ctx, w.pods[w.rng.IntN(len(w.pods))])
		}
	case 5:
		if len(w.pods) > 0 {
			gone := w.pods[0]
			w.pods = w.pods[1:]
			w.ok(client.Delete[*corev1.Pod](ctx, w.c, "default", gone, metav1.DeleteOptions{}))
		}
	case 6:
		if len(w.maps) > 0 {
			gone := w.maps[0]
			w.maps = w.maps[1:]
			w.ok(client.Delete[*corev1.ConfigMap](ctx, w.c, "default", gone, metav1.DeleteOptions{}))
		}
	}
}

func (w *quotaWriter) made(err error) bool {
	if apierrors.IsForbidden(err) {
		w.refused++
		return false
	}
	return w.ok(err)
}

func (w *quotaWriter) ok(err error) bool {
	if err != nil {
		w.t.Errorf("%s: %v", w.name, err)
	}
	return err == nil
}

func (w *quotaWriter) end(ctx context.Context, name string) {
	pod, err := client.Get[*corev1.Pod](ctx, w.c, "default", name)
	if !w.ok(err) {
		return
	}
	pod = pod.DeepCopy()
	pod.Status.Phase = corev1.PodFailed
	_, err = client.UpdateStatus(ctx, w.c, pod)
	w.ok(err)
}

func aDeployment(name string) *appsv1.Deployment {
	l := map[string]string{"a": "b"}
	return &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: l},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: l},
				Spec: apiservertest.NewPod("x").Spec},
		}}
}
