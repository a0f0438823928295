package builtin

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

// A newer LimitRange does not block unrelated updates, but applies to changed resources.
func TestLimitsOfWhatWasThere(t *testing.T) {
	all := kinds.All()
	item := func(kind corev1.LimitType, l corev1.LimitRangeItem) *corev1.LimitRange {
		l.Type = kind
		return limitRange("l", l)
	}
	labelled := func(o api.Object) api.Object {
		o.SetLabels(map[string]string{"a": "b"})
		return o
	}
	gone := func(o api.Object) api.Object {
		o.SetDeletionTimestamp(&metav1.Time{Time: time.Unix(1, 0)})
		return o
	}
	storage := item(corev1.LimitTypePersistentVolumeClaim,
		corev1.LimitRangeItem{Min: list("storage=2Gi"), Max: list("storage=4Gi")})
	each := item(corev1.LimitTypeContainer, corev1.LimitRangeItem{Max: list("cpu=1 memory=1Gi"),
		MaxLimitRequestRatio: list("cpu=1")})
	sum := item(corev1.LimitTypePod, corev1.LimitRangeItem{Max: list("cpu=1"), Min: list("memory=1Gi")})
	big := func() *corev1.Pod { return podOf(container("a", "cpu=2", "cpu=3"), container("b", "", "")) }
	for _, c := range []struct {
		what        string
		limit       *corev1.LimitRange
		stored, now api.Object
		facet, want string
	}{
		{"a large claim gets a label", storage, claimOf("storage=5Gi"), labelled(claimOf("storage=5Gi")), "", ""},
		{"a small one too", storage, claimOf("storage=1Gi"), labelled(claimOf("storage=1024Mi")), "", ""},
		{"it grows", storage, claimOf("storage=5Gi"), claimOf("storage=6Gi"), "",
			"maximum storage usage per PersistentVolumeClaim is 4Gi, but request is 6Gi"},
		{"a small one grows by too little", storage, claimOf("storage=1Gi"), claimOf("storage=1500Mi"), "",
			"minimum storage usage per PersistentVolumeClaim is 2Gi, but request is 1500Mi"},
		{"one that goes", storage, gone(claimOf("storage=5Gi")), claimOf("storage=6Gi"), "", ""},
		{"a pod keeps what it has", each, big(), labelled(big()), "resize", ""},
		{"and asks for more", each, big(), podOf(container("a", "cpu=2", "cpu=4"), container("b", "", "")), "resize",
			"[maximum cpu usage per Container is 1, but limit is 4, " +
				"cpu max limit to request ratio per Container is 1, but provided ratio is 2.000000]"},
		{"of something else", each, big(), podOf(container("a", "cpu=2", "cpu=3 memory=2Gi"), container("b", "", "")),
			"resize",
			"maximum memory usage per Container is 1Gi, but limit is 2Gi"},
		{"the sum is kept", sum, big(), big(), "resize", ""},
		{"the sum grows", sum, big(), podOf(container("a", "cpu=2", "cpu=3"), container("b", "cpu=1", "cpu=1")),
			"resize",
			"maximum cpu usage per Pod is 1, but limit is 4"},
		{"of a pod that goes", sum, gone(big()), podOf(container("a", "cpu=5", "cpu=5")), "resize", ""},
	} {
		w := admissiontest.World{"limitranges": {c.limit}}
		a := admissiontest.UpdateAttempt(all, c.stored, c.now)
		a.Facet = c.facet
		got := admissiontest.ErrorText(newLimitRanger(Config{Kinds: all, ListHeld: w.ListHeld}).enforceLimits(
			t.Context(), a))
		if _, why, ok := strings.Cut(got, " is forbidden: "); ok {
			got = why
		}
		if got != c.want {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
	}
}

// A pod that is replaced from its manifest gets back the values that admission set at its creation,
// and nothing else.
func TestPodsWrittenAnew(t *testing.T) {
	all := kinds.All()
	w := admissiontest.World{"namespaces": {&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns",
		Annotations: map[string]string{namespaceTolerations: `[{"key":"later","operator":"Exists"}]`}}}},
		"priorityclasses": {priorityClass("default", 7, true)}}
	manifest := func() *corev1.Pod { return podOf(container("c", "cpu=1", "")) }
	stored := manifest()
	value, never := int32(5), corev1.PreemptNever
	stored.Spec.Priority, stored.Spec.PreemptionPolicy = &value, &never
	admit := func(p *corev1.Pod) {
		t.Helper()
		for _, plugin := range []admission.Plugin{{Admit: defaultTolerationSeconds(time.Minute)},
			{Admit: podPriority(w)}, {Admit: podTolerations(w)}} {
			if err := plugin.Admit(t.Context(), admissiontest.UpdateAttempt(all, stored, p)); err != nil {
				t.Error(err)
			}
		}
	}
	p := manifest()
	admit(p)
	var keys []string
	for _, x := range p.Spec.Tolerations {
		keys = append(keys, x.Key)
	}
	const given = "node.kubernetes.io/not-ready node.kubernetes.io/unreachable node.kubernetes.io/memory-pressure"
	if got := strings.Join(keys, " "); got != given {
		t.Errorf("tolerations %s", got)
	}
	if p.Spec.Priority == nil || *p.Spec.Priority != 5 || p.Spec.PreemptionPolicy == nil ||
		*p.Spec.PreemptionPolicy != never ||
		p.Spec.PriorityClassName != "" {
		t.Errorf("priority %v, %v, %q", p.Spec.Priority, p.Spec.PreemptionPolicy, p.Spec.PriorityClassName)
	}
	p = manifest() // validation checks values in the manifest
	other, lower := int32(6), corev1.PreemptLowerPriority
	p.Spec.Priority, p.Spec.PreemptionPolicy = &other, &lower
	admit(p)
	if *p.Spec.Priority != 6 || *p.Spec.PreemptionPolicy != lower {
		t.Errorf("priority %d, %s", *p.Spec.Priority, *p.Spec.PreemptionPolicy)
	}
}

func priorityClass(name string, value int32, def bool) *schedulingv1.PriorityClass {
	return &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value, GlobalDefault: def}
}

// At most one PriorityClass is the default.
func TestOneDefaultPriority(t *testing.T) {
	all := kinds.All()
	w := admissiontest.World{"priorityclasses": {priorityClass("a", 1, false), priorityClass("b", 2, true)}}
	const second = `priorityclasses.scheduling.k8s.io "%" is forbidden: ` +
		`PriorityClass b is already marked as default. Only one default can exist`
	for _, c := range []struct {
		what string
		a    *admission.Attempt
		want string
	}{
		{"a new one", admissiontest.CreateAttempt(all, priorityClass("c", 3, true)),
			strings.Replace(second, "%", "c", 1)},
		{"one that is none", admissiontest.CreateAttempt(all, priorityClass("c", 3, false)), ""},
		{"the other becomes one", admissiontest.UpdateAttempt(all, priorityClass("a", 1, false),
			priorityClass("a", 1, true)), strings.Replace(second, "%", "a", 1)},
		{"it stays one", admissiontest.UpdateAttempt(all, priorityClass("b", 2, true), priorityClass("b", 2, true)),
			""},
		{"it ends to be one", admissiontest.UpdateAttempt(all, priorityClass("b", 2, true),
			priorityClass("b", 2, false)), ""},
	} {
		var err error
		for _, p := range Validating(Config{Kinds: all, Cluster: w}).Plugins {
			if p.Name == "Priority" {
				err = p.Admit(t.Context(), c.a)
			}
		}
		if got := admissiontest.ErrorText(err); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
	}
}
