package admission

import (
	"fmt"
	"maps"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

func ingressClass(name, isDefault string, age int) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(int64(1000-age), 0),
		Annotations: map[string]string{networkingv1.AnnotationIsDefaultIngressClass: isDefault}}}
}

func TestDefaultIngressClass(t *testing.T) {
	w := world{"ingressclasses": {ingressClass("old", "true", 9), ingressClass("new", "true", 1), ingressClass("also-new", "true", 1),
		ingressClass("newest", "false", 0)}}
	own := "own"
	for _, c := range []struct {
		world      world
		class      *string
		annotation string
		want       string
	}{{w, nil, "", "also-new"}, {w, &own, "", "own"}, {w, nil, "nginx", "-"}, {world{}, nil, "", "-"}} {
		in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "i"}, Spec: networkingv1.IngressSpec{IngressClassName: c.class}}
		if c.annotation != "" {
			in.Annotations = map[string]string{"kubernetes.io/ingress.class": c.annotation}
		}
		if err := defaultIngressClass(c.world)(t.Context(), making(kinds.All(), in)); err != nil {
			t.Error(err)
		}
		got := "-"
		if in.Spec.IngressClassName != nil {
			got = *in.Spec.IngressClassName
		}
		if got != c.want {
			t.Errorf("class %s, want %s", got, c.want)
		}
	}
}

// New nodes get the taint not-ready and new claims and volumes a protection finalizer, each once.
func TestMarksOfNewObjects(t *testing.T) {
	all := kinds.All()
	marks := func(o api.Object) string {
		a := making(all, o)
		for range 2 {
			if err := storageObjectInUse(t.Context(), a); err != nil {
				t.Fatal(err)
			}
			if err := taintNewNode(t.Context(), a); err != nil {
				t.Fatal(err)
			}
		}
		out := fmt.Sprint(o.GetFinalizers())
		if n, ok := o.(*corev1.Node); ok {
			for _, x := range n.Spec.Taints {
				out += " " + x.ToString()
			}
		}
		return out
	}
	for want, o := range map[string]api.Object{
		"[kubernetes.io/pvc-protection]":             claimOf("storage=1"),
		"[a kubernetes.io/pv-protection]":            &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v", Finalizers: []string{"a"}}},
		"[] node.kubernetes.io/not-ready:NoSchedule": &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}},
		"[b]": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "m", Finalizers: []string{"b"}}},
	} {
		if got := marks(o); got != want {
			t.Errorf("%T: %s, want %s", o, got, want)
		}
	}
}

func TestTolerationPlugins(t *testing.T) {
	all := kinds.All()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "ns", Annotations: map[string]string{
		namespaceTolerations: `[{"key":"own","operator":"Exists","effect":"NoSchedule"}]`,
		namespaceAllowed:     `[{"key":"own","operator":"Exists"},{"key":"gpu","value":"a"},{"key":"node.kubernetes.io/memory-pressure","operator":"Exists"}]`,
	}}}
	w := world{"namespaces": {ns}}
	for _, c := range []struct {
		request string
		have    []corev1.Toleration
		want    string
	}{
		{"", nil, "own"},
		{"cpu=1", []corev1.Toleration{{Key: "gpu", Value: "a"}}, "gpu own node.kubernetes.io/memory-pressure"},
		{"", []corev1.Toleration{{Key: "own", Operator: corev1.TolerationOpExists}}, "own"},
		{"", []corev1.Toleration{{Key: "gpu", Value: "b"}},
			`pods "p" is forbidden: pod tolerations (possibly merged with namespace default tolerations) conflict with its namespace whitelist`},
	} {
		p := podOf(container("c", c.request, ""))
		p.Spec.Tolerations = c.have
		a := making(all, p)
		err := podTolerations(w)(t.Context(), a)
		if err == nil {
			err = allowedTolerations(w)(t.Context(), a)
		}
		got := said(err)
		if err == nil {
			var keys []string
			for _, x := range p.Spec.Tolerations {
				keys = append(keys, x.Key)
			}
			got = strings.Join(keys, " ")
		}
		if got != c.want {
			t.Errorf("%v: %s, want %s", c.have, got, c.want)
		}
	}
	ns.Annotations[namespaceAllowed] = "x"
	p := podOf(container("c", "", ""))
	p.Spec.Tolerations = []corev1.Toleration{{Key: "a"}}
	if err := allowedTolerations(w)(t.Context(), making(all, p)); err == nil {
		t.Error("an annotation that cannot be read allows all")
	}
	p = podOf(container("c", "cpu=1 example.com/gpu=1 example.com/fpga=1", ""))
	a := making(all, p)
	for range 2 {
		if err := extendedResourceToleration(t.Context(), a); err != nil {
			t.Fatal(err)
		}
	}
	if len(p.Spec.Tolerations) != 2 || p.Spec.Tolerations[0].Key != "example.com/fpga" {
		t.Errorf("extended resources: %v", p.Spec.Tolerations)
	}
}

// The optional plugins are selected by the flags of kube-apiserver.
func TestChoose(t *testing.T) {
	for _, c := range []struct {
		enable, disable, want string
	}{
		{"", "", "[]"},
		{"PodTolerationRestriction,LimitRanger,PodTolerationRestriction", "", "[PodTolerationRestriction]"},
		{"", "ExtendedResourceToleration,AlwaysPullImages", "[]"},
		{"", "ResourceQuota", "--disable-admission-plugins: ResourceQuota always runs"},
		{"PodNodeSelector", "", "--enable-admission-plugins: there is no PodNodeSelector: let a MutatingAdmissionPolicy set spec.nodeSelector"},
		{"Nonsense", "", `--enable-admission-plugins: "Nonsense" is unknown; on request run DenyServiceExternalIPs, ExtendedResourceToleration, OwnerReferencesPermissionEnforcement, PodTolerationRestriction`},
		{"PodTolerationRestriction", "PodTolerationRestriction", "PodTolerationRestriction in enable-admission-plugins and disable-admission-plugins overlapped"},
	} {
		split := func(s string) []string { return strings.FieldsFunc(s, func(r rune) bool { return r == ',' }) }
		chosen, err := Choose(split(c.enable), split(c.disable))
		got := fmt.Sprint(chosen)
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("enable %q, disable %q: %s", c.enable, c.disable, got)
		}
	}
	names := func(asked ...string) string {
		c := Config{Plugins: asked, LostNodeToleration: time.Second}
		var out []string
		for _, p := range append(Mutating(c).Plugins, Validating(c).Plugins...) {
			out = append(out, p.Name)
		}
		return strings.Join(out, " ")
	}
	if strings.Contains(names(), PodTolerationRestriction) || strings.Count(names(PodTolerationRestriction), PodTolerationRestriction) != 2 {
		t.Errorf("plugins: %s", names(PodTolerationRestriction))
	}
}

// F82: the tolerations that a pod has for lost nodes always win over the default of the cluster,
// also on an update. The default is added only for a taint that the pod does not tolerate with
// effect NoExecute.
func TestOwnTolerationsOfLostNodesWin(t *testing.T) {
	const stay = 15
	own := func(key string, op corev1.TolerationOperator, effect corev1.TaintEffect, seconds int64) corev1.Toleration {
		x := corev1.Toleration{Key: key, Operator: op, Effect: effect}
		if seconds >= 0 {
			x.TolerationSeconds = &seconds
		}
		return x
	}
	const notReady, unreachable, forever = corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, -1
	for name, c := range map[string]struct {
		own  []corev1.Toleration
		want map[string]int64 // key → seconds of the added tolerations
	}{
		"none": {nil, map[string]int64{notReady: stay, unreachable: stay}},
		"both, longer": {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, corev1.TaintEffectNoExecute, 600),
			own(unreachable, corev1.TolerationOpExists, corev1.TaintEffectNoExecute, 600)}, nil},
		"both, shorter": {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, corev1.TaintEffectNoExecute, 0),
			own(unreachable, corev1.TolerationOpExists, corev1.TaintEffectNoExecute, 2)}, nil},
		"one, for ever":    {[]corev1.Toleration{own(unreachable, corev1.TolerationOpExists, corev1.TaintEffectNoExecute, forever)}, map[string]int64{notReady: stay}},
		"by value":         {[]corev1.Toleration{own(notReady, corev1.TolerationOpEqual, corev1.TaintEffectNoExecute, 300)}, map[string]int64{unreachable: stay}},
		"every effect":     {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, "", forever)}, map[string]int64{unreachable: stay}},
		"every taint":      {[]corev1.Toleration{own("", corev1.TolerationOpExists, "", forever)}, nil},
		"scheduling alone": {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, corev1.TaintEffectNoSchedule, forever)}, map[string]int64{notReady: stay, unreachable: stay}},
	} {
		for verb, attempt := range map[string]func(*corev1.Pod) *Attempt{
			"create": func(p *corev1.Pod) *Attempt { return making(kinds.All(), p) },
			"update": func(p *corev1.Pod) *Attempt { return changing(kinds.All(), p.DeepCopy(), p) },
		} {
			p := podOf(container("c", "cpu=1", ""))
			p.Spec.Tolerations = c.own[:len(c.own):len(c.own)]
			if err := defaultTolerationSeconds(stay*time.Second)(t.Context(), attempt(p)); err != nil {
				t.Fatal(err)
			}
			for i, x := range c.own {
				if !reflect.DeepEqual(p.Spec.Tolerations[i], x) {
					t.Errorf("%s, %s: the pod's own toleration became %v, was %v", name, verb, p.Spec.Tolerations[i], x)
				}
			}
			added := map[string]int64{}
			for _, x := range p.Spec.Tolerations[len(c.own):] {
				added[x.Key] = *x.TolerationSeconds
			}
			if !maps.Equal(added, c.want) {
				t.Errorf("%s, %s: added %v, want %v", name, verb, added, c.want)
			}
		}
	}
}
