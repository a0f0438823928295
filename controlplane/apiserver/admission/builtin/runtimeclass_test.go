package builtin

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

func runtimeClassOf(name, overhead string, s *nodev1.Scheduling) *nodev1.RuntimeClass {
	c := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: "h", Scheduling: s}
	if overhead != "" {
		c.Overhead = &nodev1.Overhead{PodFixed: list(overhead)}
	}
	return c
}

// The fields that a RuntimeClass adds to pods, and Kubernetes' errors for rejected pods.
func TestRuntimeClass(t *testing.T) {
	const forbidden = `pods "p" is forbidden: `
	exists := func(key string) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}
	}
	w := admissiontest.World{"runtimeclasses": {
		runtimeClassOf("plain", "", nil),
		runtimeClassOf("heavy", "cpu=100m memory=64Mi", nil),
		runtimeClassOf("placed", "", &nodev1.Scheduling{NodeSelector: map[string]string{"a": "1", "b": "2"},
			Tolerations: []corev1.Toleration{exists("t"),
				{Key: "u", Value: "v", Effect: corev1.TaintEffectNoSchedule}}}),
	}}
	for _, c := range []struct {
		what, class string
		change      func(s *corev1.PodSpec)
		want        string
	}{
		{"none", "-", nil, "overhead[] selector[] tolerations[]"},
		{"the node's own", "", nil, "overhead[] selector[] tolerations[]"},
		{"that adds nothing", "plain", nil, "overhead[] selector[] tolerations[]"},
		{"missing", "gone", nil, forbidden + `pod rejected: RuntimeClass "gone" not found`},
		{"overhead", "heavy", nil, "overhead[cpu=100m memory=64Mi] selector[] tolerations[]"},
		{"the same overhead", "heavy", func(s *corev1.PodSpec) { s.Overhead = list("memory=65536Ki cpu=0.1") },
			"overhead[cpu=100m memory=64Mi] selector[] tolerations[]"},
		{"another overhead", "heavy", func(s *corev1.PodSpec) { s.Overhead = list("cpu=100m") },
			forbidden + "pod rejected: Pod's Overhead doesn't match RuntimeClass's defined Overhead"},
		{"overhead without a class", "-", func(s *corev1.PodSpec) { s.Overhead = list("cpu=1") },
			forbidden + "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"},
		{"overhead of a class that has none", "plain", func(s *corev1.PodSpec) { s.Overhead = list("cpu=1") },
			forbidden + "pod rejected: Pod Overhead set without corresponding RuntimeClass defined Overhead"},
		{"scheduling", "placed", nil, "overhead[] selector[a=1 b=2] tolerations[t u]"},
		{"scheduling that is there", "placed", func(s *corev1.PodSpec) {
			s.NodeSelector, s.Tolerations = map[string]string{"a": "1", "c": "3"},
				[]corev1.Toleration{exists("x"), exists("u")}
		}, "overhead[] selector[a=1 b=2 c=3] tolerations[x u t]"},
		{"a selector against it", "placed", func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{"b": "3"} },
			forbidden + "conflict: runtimeClass.scheduling.nodeSelector[b] = 2; pod.spec.nodeSelector[b] = 3"},
	} {
		p := podOf(container("c", "", ""))
		if c.class != "-" {
			p.Spec.RuntimeClassName = &c.class
		}
		if c.change != nil {
			c.change(&p.Spec)
		}
		a := admissiontest.CreateAttempt(kinds.All(), p)
		var err error
		for range 2 { // the second round must not change the result of the first
			if err == nil {
				err = runtimeClass(w)(t.Context(), a)
			}
		}
		if err == nil {
			err = runtimeOverhead(w)(t.Context(), a)
		}
		got := admissiontest.ErrorText(err)
		if err == nil {
			got = added(&p.Spec)
		}
		if got != c.want {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
		for k := range p.Spec.NodeSelector { // changes of the pod do not affect the class
			p.Spec.NodeSelector[k] = "x"
		}
		for k := range p.Spec.Overhead {
			delete(p.Spec.Overhead, k)
		}
	}
}

func added(s *corev1.PodSpec) string {
	var overhead, selector, tolerations []string
	for _, k := range slices.Sorted(maps.Keys(s.Overhead)) {
		q := s.Overhead[k]
		overhead = append(overhead, string(k)+"="+q.String())
	}
	for _, k := range slices.Sorted(maps.Keys(s.NodeSelector)) {
		selector = append(selector, k+"="+s.NodeSelector[k])
	}
	for _, x := range s.Tolerations {
		tolerations = append(tolerations, x.Key)
	}
	return fmt.Sprintf("overhead%v selector%v tolerations%v", overhead, selector, tolerations)
}

// Only new pods are checked: deleting a class does not affect existing pods.
func TestRuntimeClassOfOldPods(t *testing.T) {
	gone := "gone"
	p := podOf(container("c", "", ""))
	p.Spec.RuntimeClassName, p.Spec.Overhead = &gone, list("cpu=1")
	for what, change := range map[string]func(a *admission.Attempt){
		"update":      func(a *admission.Attempt) { a.Operation, a.Stored = api.Update, p },
		"subresource": func(a *admission.Attempt) { a.Operation, a.Stored, a.Facet = api.Update, p, "status" },
		"delete":      func(a *admission.Attempt) { a.Operation, a.Stored = api.Delete, p },
	} {
		a := admissiontest.CreateAttempt(kinds.All(), p)
		change(a)
		for _, admit := range []func(admission.Cluster) admission.Plugin{
			func(c admission.Cluster) admission.Plugin { return admission.Plugin{Admit: runtimeClass(c)} },
			func(c admission.Cluster) admission.Plugin { return admission.Plugin{Admit: runtimeOverhead(c)} },
		} {
			if err := admit(admissiontest.World{}).Admit(t.Context(), a); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}
