package authz

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

func TestRuleMatches(t *testing.T) {
	for _, x := range []struct {
		rule rbacv1.PolicyRule
		ask  Attributes
		want bool
	}{
		{newRule("get", "", "pods"), Attributes{Verb: "get", Resource: "pods"}, true},
		{newRule("get", "", "pods"), Attributes{Verb: "get", Resource: "pods", Subresource: "log"}, false},
		{newRule("get", "", "pods/log"), Attributes{Verb: "get", Resource: "pods", Subresource: "log"}, true},
		{newRule("get", "", "pods/log"), Attributes{Verb: "get", Resource: "pods"}, false},
		{newRule("get", "", "*/log"), Attributes{Verb: "get", Resource: "pods", Subresource: "log"}, true},
		{newRule("*", "*", "*"), Attributes{Verb: "nod", APIGroup: "x.io", Resource: "things", Subresource: "s"}, true},
		{newRule("*", "*", "*"), Attributes{Verb: "get", Path: "/metrics"}, false},
		{newRule("get", "apps", "deployments"), Attributes{Verb: "get", Resource: "deployments"}, false},
		{newRule("get", "core apps", "deployments"), Attributes{Verb: "get", Resource: "deployments"}, true},
		{newRule("get", "", "secrets", "one"), Attributes{Verb: "get", Resource: "secrets", Name: "one"}, true},
		{newRule("get", "", "secrets", "one"), Attributes{Verb: "get", Resource: "secrets", Name: "two"}, false},
		{newRule("list", "", "secrets", "one"), Attributes{Verb: "list", Resource: "secrets"}, false},
		{pathRule("get", "/healthz"), Attributes{Verb: "get", Path: "/healthz"}, true},
		{pathRule("get", "/healthz"), Attributes{Verb: "get", Path: "/healthz/etcd"}, false},
		{pathRule("get", "/apis/*"), Attributes{Verb: "get", Path: "/apis/apps/v1"}, true},
		{pathRule("get", "/apis/*"), Attributes{Verb: "get", Path: "/apis"}, false},
		{pathRule("*", "*"), Attributes{Verb: "post", Path: "/anything"}, true},
	} {
		if got := allowsAttributes(&x.rule, &x.ask); got != x.want {
			t.Errorf("%v for %+v: %v", x.rule, x.ask, got)
		}
	}
}

// Uncovered is compared with a brute-force implementation: rules cover others exactly if no request
// is allowed by the others only.
func TestUncoveredAgainstBruteForce(t *testing.T) {
	verbs, groups, resources, names := []string{"get", "list", "*"}, []string{"", "apps", "*"},
		[]string{"pods", "pods/log", "*/log", "*"}, []string{"a", "b"}
	some := func(from []string) []string {
		var out []string
		for _, v := range from {
			if rand.IntN(3) == 0 {
				out = append(out, v)
			}
		}
		return out
	}
	random := func() (out []rbacv1.PolicyRule) {
		for range rand.IntN(3) + 1 {
			out = append(out, rbacv1.PolicyRule{Verbs: some(verbs), APIGroups: some(groups), Resources: some(resources),
				ResourceNames: some(names)})
		}
		return out
	}
	any := func(rules []rbacv1.PolicyRule, a *Attributes) bool {
		for i := range rules {
			if allowsAttributes(&rules[i], a) {
				return true
			}
		}
		return false
	}
	covered := 0
	for range 20000 {
		held, wanted := random(), random()
		if len(Uncovered(held, wanted)) > 0 {
			continue
		}
		covered++
		for _, verb := range []string{"get", "list", "watch"} {
			for _, group := range []string{"", "apps", "batch"} {
				for _, res := range [][2]string{{"pods", ""}, {"pods", "log"}, {"jobs", ""}, {"jobs", "log"}} {
					for _, name := range []string{"", "a", "b", "c"} {
						a := &Attributes{Verb: verb, APIGroup: group, Resource: res[0], Subresource: res[1], Name: name}
						if any(wanted, a) && !any(held, a) {
							t.Fatalf("held %v is said to cover %v, but not %+v", held, wanted, a)
						}
					}
				}
			}
		}
	}
	if covered < 100 {
		t.Errorf("only %d covered pairs: the test says little", covered)
	}
}

// The index follows added, changed, removed and relisted objects.
func TestRBACFollows(t *testing.T) {
	z := NewRBAC()
	roles, bindings := rbacSink{rbac: z, clustered: true}, rbacSink{rbac: z, binding: true}
	ask := func(user string) Decision {
		d, _ := z.Authorize(context.Background(),
			&Attributes{User: api.User{Name: user}, Verb: "get", Resource: "pods", Namespace: "a"})
		return d
	}
	bind := func(role string, who ...string) *rbacv1.RoleBinding {
		b := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"},
			RoleRef: rbacv1.RoleRef{Kind: "ClusterRole", Name: role}}
		for _, w := range who {
			b.Subjects = append(b.Subjects, userSubject(w))
		}
		return b
	}
	bindings.Set(bind("reader", "x", "y"))
	if d, reason := z.Authorize(context.Background(),
		&Attributes{User: api.User{Name: "x"}, Verb: "get", Resource: "pods", Namespace: "a"}); d != NoOpinion ||
		reason != `RBAC: clusterrole.rbac.authorization.k8s.io "reader" not found` {
		t.Errorf("before the role: %v %q", d, reason)
	}
	roles.Replace([]api.Object{&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"},
		Rules: []rbacv1.PolicyRule{newRule("get", "", "pods")}}})
	if ask("x") != Allow || ask("y") != Allow || ask("z") != NoOpinion {
		t.Error("bound users are not told from others")
	}
	bindings.Set(bind("reader", "y", "z"))
	if ask("x") != NoOpinion || ask("y") != Allow || ask("z") != Allow {
		t.Error("a changed binding")
	}
	bindings.Replace(nil)
	if ask("y") != NoOpinion || len(z.bySubj) != 0 {
		t.Errorf("after an empty list: %v", z.bySubj)
	}
	bindings.Set(&rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "b"},
		RoleRef:  rbacv1.RoleRef{Kind: "ClusterRole", Name: "reader"},
		Subjects: []rbacv1.Subject{{Kind: "ServiceAccount", Name: "robot"}}})
	if ask("system:serviceaccount:a:robot") != Allow || ask("robot") != NoOpinion {
		t.Error("the subject of a service account does not include its namespace")
	}
	roles.Remove(&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "reader"}})
	if ask("system:serviceaccount:a:robot") != NoOpinion {
		t.Error("a removed role still grants")
	}
}

// All references of a pod to Secrets and ConfigMaps are found, and nothing else.
func TestRefers(t *testing.T) {
	volume := func(v corev1.VolumeSource) corev1.PodSpec {
		return corev1.PodSpec{Volumes: []corev1.Volume{{Name: "v", VolumeSource: v}}}
	}
	local := corev1.LocalObjectReference{Name: "x"}
	for name, x := range map[string]struct {
		resource string
		spec     corev1.PodSpec
	}{
		"secret volume": {"secrets",
			volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "x"}})},
		"projected secret": {"secrets",
			volume(
				corev1.VolumeSource{
					Projected: &corev1.ProjectedVolumeSource{
						Sources: []corev1.VolumeProjection{
							{Secret: &corev1.SecretProjection{LocalObjectReference: local}}}}})},
		"csi secret": {"secrets",
			volume(corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{NodePublishSecretRef: &local}})},
		"pull secret": {"secrets", corev1.PodSpec{ImagePullSecrets: []corev1.LocalObjectReference{local}}},
		"secret env": {"secrets",
			corev1.PodSpec{InitContainers: []corev1.Container{
				{
					Env: []corev1.EnvVar{
						{
							ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
								LocalObjectReference: local}}}}}}}},
		"secret env from": {"secrets",
			corev1.PodSpec{Containers: []corev1.Container{
				{EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: local}}}}}}},
		"config volume": {"configmaps",
			volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: local}})},
		"projected config": {"configmaps",
			volume(
				corev1.VolumeSource{
					Projected: &corev1.ProjectedVolumeSource{
						Sources: []corev1.VolumeProjection{
							{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local}}}}})},
		"config env": {"configmaps",
			corev1.PodSpec{Containers: []corev1.Container{
				{
					Env: []corev1.EnvVar{
						{
							ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{
								LocalObjectReference: local}}}}}}}},
		"claim": {"persistentvolumeclaims",
			volume(
				corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "x"}})},
		"account": {"serviceaccounts", corev1.PodSpec{ServiceAccountName: "x"}},
	} {
		p := &corev1.Pod{Spec: x.spec}
		for _, resource := range []string{"secrets", "configmaps", "persistentvolumeclaims", "serviceaccounts"} {
			if got := refersTo(p, resource, "x"); got != (resource == x.resource) {
				t.Errorf("%s: refers to %s x: %v", name, resource, got)
			}
			if refersTo(p, resource, "other") {
				t.Errorf("%s: refers to %s other", name, resource)
			}
			mirror := p.DeepCopy()
			mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
			if refersTo(mirror, resource, "x") {
				t.Errorf("%s: a mirror pod refers to %s x", name, resource)
			}
		}
	}
}

// The roles of all bootstrap bindings are bootstrap objects too.
func TestBootstrapIsWhole(t *testing.T) {
	roles := map[string]bool{}
	for _, o := range BootstrapObjects() {
		if r, ok := o.(*rbacv1.ClusterRole); ok {
			if roles[r.Name] || len(r.Rules) == 0 {
				t.Errorf("role %s is doubled or empty", r.Name)
			}
			roles[r.Name] = true
		}
	}
	for _, o := range BootstrapObjects() {
		if b, ok := o.(*rbacv1.ClusterRoleBinding); ok && !roles[b.RoleRef.Name] {
			t.Errorf("binding %s names role %s, which is not made", b.Name, b.RoleRef.Name)
		}
	}
	if missing := Uncovered(adminRules(), editRules()); len(missing) > 0 {
		t.Errorf("admin lacks %s", fmt.Sprint(missing))
	}
	if missing := Uncovered(editRules(), viewRules()); len(missing) > 0 {
		t.Errorf("edit lacks %s", fmt.Sprint(missing))
	}
}

// The Ingress and Gateway proxies can read the objects that they serve, but no Secret in any
// namespace. They can neither get a token of another user nor execute in a pod.
func TestProxiesReadNoSecret(t *testing.T) {
	roles := map[string][]rbacv1.PolicyRule{}
	for _, o := range BootstrapObjects() {
		if r, ok := o.(*rbacv1.ClusterRole); ok {
			roles[r.Name] = r.Rules
		}
	}
	for _, account := range []string{"entry", "gw-web-0123456789"} {
		user := api.User{Name: "system:serviceaccount:keelson-entry:" + account,
			Groups: []string{api.GroupServiceAccounts, api.GroupServiceAccounts + ":keelson-entry",
				api.GroupAuthenticated}}
		var rules []rbacv1.PolicyRule
		for _, o := range BootstrapObjects() {
			if b, ok := o.(*rbacv1.ClusterRoleBinding); ok &&
				slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool {
					return s.Kind == rbacv1.GroupKind && slices.Contains(user.Groups, s.Name) ||
						s.Kind == rbacv1.ServiceAccountKind &&
							"system:serviceaccount:"+s.Namespace+":"+s.Name == user.Name
				}) {
				rules = append(rules, roles[b.RoleRef.Name]...)
			}
		}
		may := func(verb, group, resource, subresource string) bool {
			a := Attributes{User: user, Verb: verb, APIGroup: group, Resource: resource, Subresource: subresource,
				Namespace: "keelson-entry", Name: "x"}
			return slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool { return allowsAttributes(&r, &a) })
		}
		for _, verb := range []string{"get", "list", "watch", "create", "update", "patch", "delete",
			"deletecollection"} {
			if may(verb, "", "secrets", "") {
				t.Errorf("%s may %s Secrets", account, verb)
			}
			if verb == "create" && (may(verb, "", "pods", "") || may(verb, "", "pods", "exec") ||
				may(verb, "", "serviceaccounts", "token")) {
				t.Errorf("%s may come by the rights of others", account)
			}
		}
		if !may("watch", "discovery.k8s.io", "endpointslices", "") ||
			may("watch", "networking.k8s.io", "ingresses", "") != (account == "entry") {
			t.Errorf("%s has other rights than it needs", account)
		}
	}
}
