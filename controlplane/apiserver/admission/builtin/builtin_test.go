package builtin

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
	"keelson.dev/keelson/controlplane/apiserver/admission/objectlimits"
)

func ingressClass(name, isDefault string, age int) *networkingv1.IngressClass {
	return &networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name,
		CreationTimestamp: metav1.Unix(int64(1000-age), 0),
		Annotations:       map[string]string{networkingv1.AnnotationIsDefaultIngressClass: isDefault}}}
}

func TestDefaultIngressClass(t *testing.T) {
	w := admissiontest.World{"ingressclasses": {ingressClass("old", "true", 9), ingressClass("new", "true", 1),
		ingressClass("also-new", "true", 1),
		ingressClass("newest", "false", 0)}}
	own := "own"
	for _, c := range []struct {
		world      admissiontest.World
		class      *string
		annotation string
		want       string
	}{{w, nil, "", "also-new"}, {w, &own, "", "own"}, {w, nil, "nginx", "-"}, {admissiontest.World{}, nil, "", "-"}} {
		in := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "i"},
			Spec: networkingv1.IngressSpec{IngressClassName: c.class}}
		if c.annotation != "" {
			in.Annotations = map[string]string{"kubernetes.io/ingress.class": c.annotation}
		}
		if err := defaultIngressClass(c.world)(t.Context(), admissiontest.CreateAttempt(kinds.All(), in)); err != nil {
			t.Error(err)
		}
		got := ptr.Deref(in.Spec.IngressClassName, "-")
		if got != c.want {
			t.Errorf("class %s, want %s", got, c.want)
		}
	}
}

// New nodes get the taint not-ready and new claims and volumes a protection finalizer, each once.
func TestMarksOfNewObjects(t *testing.T) {
	all := kinds.All()
	marks := func(o api.Object) string {
		a := admissiontest.CreateAttempt(all, o)
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
		"[kubernetes.io/pvc-protection]": claimOf("storage=1"),
		"[a kubernetes.io/pv-protection]": &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v",
			Finalizers: []string{"a"}}},
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
		namespaceAllowed: `[{"key":"own","operator":"Exists"},{"key":"gpu","value":"a"},` +
			`{"key":"node.kubernetes.io/memory-pressure","operator":"Exists"}]`,
	}}}
	w := admissiontest.World{"namespaces": {ns}}
	for _, c := range []struct {
		request string
		have    []corev1.Toleration
		want    string
	}{
		{"", nil, "own"},
		{"cpu=1", []corev1.Toleration{{Key: "gpu", Value: "a"}}, "gpu own node.kubernetes.io/memory-pressure"},
		{"", []corev1.Toleration{{Key: "own", Operator: corev1.TolerationOpExists}}, "own"},
		{"", []corev1.Toleration{{Key: "gpu", Value: "b"}},
			`pods "p" is forbidden: pod tolerations (possibly merged with namespace default tolerations) conflict ` +
				`with its namespace whitelist`},
	} {
		p := podOf(container("c", c.request, ""))
		p.Spec.Tolerations = c.have
		a := admissiontest.CreateAttempt(all, p)
		err := podTolerations(w)(t.Context(), a)
		if err == nil {
			err = allowedTolerations(w)(t.Context(), a)
		}
		got := admissiontest.ErrorText(err)
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
	if err := allowedTolerations(w)(t.Context(), admissiontest.CreateAttempt(all, p)); err == nil {
		t.Error("an annotation that cannot be read allows all")
	}
	p = podOf(container("c", "cpu=1 example.com/gpu=1 example.com/fpga=1", ""))
	a := admissiontest.CreateAttempt(all, p)
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
		{"PodNodeSelector", "", "--enable-admission-plugins: PodNodeSelector is not supported: use a " +
			"MutatingAdmissionPolicy that sets spec.nodeSelector"},
		{"Nonsense", "", `--enable-admission-plugins: unknown plugin "Nonsense"; the optional plugins are ` +
			`DenyServiceExternalIPs, ExtendedResourceToleration, OwnerReferencesPermissionEnforcement, ` +
			`PodTolerationRestriction`},
		{"PodTolerationRestriction", "PodTolerationRestriction",
			"PodTolerationRestriction in enable-admission-plugins and disable-admission-plugins overlapped"},
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
	if strings.Contains(names(), PodTolerationRestriction) ||
		strings.Count(names(PodTolerationRestriction), PodTolerationRestriction) != 2 {
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
		"one, for ever": {[]corev1.Toleration{own(unreachable, corev1.TolerationOpExists,
			corev1.TaintEffectNoExecute, forever)}, map[string]int64{notReady: stay}},
		"by value": {[]corev1.Toleration{own(notReady, corev1.TolerationOpEqual, corev1.TaintEffectNoExecute,
			300)}, map[string]int64{unreachable: stay}},
		"every effect": {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, "", forever)},
			map[string]int64{unreachable: stay}},
		"every taint": {[]corev1.Toleration{own("", corev1.TolerationOpExists, "", forever)}, nil},
		"scheduling alone": {[]corev1.Toleration{own(notReady, corev1.TolerationOpExists, corev1.TaintEffectNoSchedule,
			forever)}, map[string]int64{notReady: stay, unreachable: stay}},
	} {
		for verb, attempt := range map[string]func(*corev1.Pod) *admission.Attempt{
			"create": func(p *corev1.Pod) *admission.Attempt { return admissiontest.CreateAttempt(kinds.All(), p) },
			"update": func(p *corev1.Pod) *admission.Attempt {
				return admissiontest.UpdateAttempt(kinds.All(), p.DeepCopy(), p)
			},
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

// F117: plugin DenyServiceExternalIPs runs on request only.
func TestDenyServiceExternalIPsRunsOnRequest(t *testing.T) {
	has := func(c Config) bool {
		return slices.ContainsFunc(Validating(c).Plugins, func(p admission.Plugin) bool {
			return p.Name == DenyServiceExternalIPs
		})
	}
	var c Config
	if has(c) {
		t.Error("the plugin runs without being asked for")
	}
	var err error
	if c.Plugins, err = Choose([]string{"DenyServiceExternalIPs"}, nil); err != nil || !has(c) {
		t.Errorf("the plugin does not run: %v", err)
	}
}

// F32: an event that another plugin rejects does not count as written by the node.
func TestEventsThatAreRefusedDoNotCount(t *testing.T) {
	all, w := kinds.All(), admissiontest.World{}
	clock := func() time.Time { return time.Unix(1000, 0) }
	plugins := Validating(Config{Cluster: w, Clock: clock, Limits: objectlimits.Config{
		Cluster: w, Clock: clock,
		NodeOf: func(u api.User) (string, bool) { return strings.CutPrefix(u.Name, api.NodeUserPrefix) },
		PodsOf: func(string) []*corev1.Pod { return nil },
	}}).Plugins
	long := strings.Repeat("x", objectlimits.MaxEventSize)
	write := func(n int, message string) error {
		e := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("e%d", n)}}
		e.Message = message
		a := admissiontest.CreateAttempt(all, e)
		a.User, a.Request.Namespace = api.User{Name: api.NodeUserPrefix + "a"}, e.Namespace
		for _, p := range plugins {
			if !slices.Contains([]string{"NodeBounds", "EventBound", "NodeEventBound"}, p.Name) {
				continue
			}
			if err := p.Admit(t.Context(), a); err != nil {
				return err
			}
		}
		return nil
	}
	for n := range objectlimits.MaxNodeEvents {
		if err := write(n, long); !strings.Contains(admissiontest.ErrorText(err), "bytes, the maximum is") {
			t.Fatal(err)
		}
	}
	if err := write(objectlimits.MaxNodeEvents, ""); err != nil {
		t.Error(err)
	}
}
