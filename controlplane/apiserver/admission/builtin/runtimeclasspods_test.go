package builtin_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/quota"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// The overhead and scheduling of a RuntimeClass are added to a pod, in a dry run too. Overhead
// counts for quotas but not for limit ranges, and does not change with the class. A pod with other
// values is rejected.
func TestRuntimeClassOfPods(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(&nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: "boxed"}, Handler: "runc",
		Overhead: &nodev1.Overhead{PodFixed: quantities("cpu", "100m", "memory", "64Mi")},
		Scheduling: &nodev1.Scheduling{NodeSelector: map[string]string{"pool": "b"},
			Tolerations: []corev1.Toleration{{Key: "boxed", Operator: "Exists"}}}})
	r.Must(newQuota("compute", "requests.cpu", "1"))
	r.Must(&corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "l"},
		Spec: corev1.LimitRangeSpec{
			Limits: []corev1.LimitRangeItem{{Type: corev1.LimitTypePod, Max: quantities("cpu", "600m")}}}})
	pods := r.Admin().CoreV1().Pods("default")
	boxed := func(name, class, cpu string) *corev1.Pod {
		p := newPodWithCPU(name, cpu)
		p.Spec.RuntimeClassName = &class
		p.Spec.Containers[0].Resources.Limits = quantities("cpu", cpu)
		return p
	}
	same := boxed("same", "boxed", "1m")
	same.Spec.Overhead = quantities("cpu", "0.1", "memory", "65536Ki")
	other := boxed("other", "boxed", "1m")
	other.Spec.Overhead = quantities("cpu", "1m")
	bad := boxed("bad", "boxed", "1m")
	bad.Spec.Overhead = quantities("beans", "1")
	elsewhere := boxed("elsewhere", "boxed", "1m")
	elsewhere.Spec.NodeSelector = map[string]string{"pool": "a"}
	for _, c := range []struct {
		what string
		pod  *corev1.Pod
		dry  bool
		want string
	}{
		{"as large as a pod may be", boxed("a", "boxed", "600m"), true, ""},
		{"larger", boxed("a", "boxed", "601m"), true,
			`pods "a" is forbidden: maximum cpu usage per Pod is 600m, but limit is 601m`},
		{"no such class", boxed("a", "gone", "1m"), true,
			`pods "a" is forbidden: pod rejected: RuntimeClass "gone" not found`},
		{"another overhead", other, true,
			`pods "other" is forbidden: pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead`},
		{"an overhead of beans", bad, true,
			`pods "bad" is forbidden: pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead`},
		{"another pool", elsewhere, true,
			`pods "elsewhere" is forbidden: conflict: runtimeClass.scheduling.nodeSelector[pool] = b; ` +
				`pod.spec.nodeSelector[pool] = a`},
		{"half of the quota", boxed("a", "boxed", "400m"), false, ""},
		{"more than the other half", boxed("b", "boxed", "401m"), true,
			`pods "b" is forbidden: exceeded quota: compute, requested: requests.cpu=501m, used: requests.cpu=500m, ` +
				`limited: requests.cpu=1`},
		{"its own overhead, as the class has it", same, true, ""},
		{"the other half", boxed("b", "boxed", "400m"), false, ""},
	} {
		o := metav1.CreateOptions{}
		if c.dry {
			o.DryRun = []string{metav1.DryRunAll}
		}
		p, err := pods.Create(ctx, c.pod, o)
		if got := admissiontest.ErrorText(err); got != c.want || err != nil && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
		if err != nil {
			continue
		}
		if got := quota.Format(p.Spec.Overhead); got != "cpu=100m,memory=64Mi" || p.Spec.NodeSelector["pool"] != "b" ||
			p.Spec.Tolerations[len(p.Spec.Tolerations)-1].Key != "boxed" {
			t.Errorf("%s: overhead %s, selector %v, tolerations %v", c.what, got, p.Spec.NodeSelector,
				p.Spec.Tolerations)
		}
	}
	// The class lends nothing to pods that are there: neither a change nor its end reaches them.
	if err := r.Admin().NodeV1().RuntimeClasses().Delete(ctx, "boxed", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	p, err := pods.Get(ctx, "a", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.Labels = map[string]string{"k": "v"}
	if p, err = pods.Update(ctx, p, metav1.UpdateOptions{}); err != nil ||
		quota.Format(p.Spec.Overhead) != "cpu=100m,memory=64Mi" {
		t.Errorf("after the class has gone: %v, %v", p, err)
	}
	p.Spec.Overhead = nil
	if _, err = pods.Update(ctx, p, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("overhead was changed: %v", err)
	}
	// In a template overhead stands as it is until a pod is made of it, its resources apart.
	d := aDeployment("x")
	d.Spec.Template.Spec.Overhead = quantities("beans", "1")
	if err := apiservertest.TryCreate(r.PipelineClient("admin"), d, true); !apierrors.IsInvalid(err) ||
		!apierrors.HasStatusCause(err, metav1.CauseTypeFieldValueInvalid) {
		t.Errorf("a template with an overhead of beans: %v", err)
	}
}
