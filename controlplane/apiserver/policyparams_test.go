package apiserver

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/pki"
)

const policyPath = "/apis/admissionregistration.k8s.io/v1/"

// policyForms is both kinds of policy with their bindings: the fields that their specs need besides
// the parameters.
var policyForms = []struct{ kind, policies, policy, bindings, binding string }{
	{"ValidatingAdmissionPolicy", "validatingadmissionpolicies", `"validations":[{"expression":"true"}]`,
		"validatingadmissionpolicybindings", `"validationActions":["Deny"],`},
	{"MutatingAdmissionPolicy", "mutatingadmissionpolicies",
		`"reinvocationPolicy":"Never","mutations":[{"patchType":"JSONPatch","jsonPatch":{"expression":"[]"}}]`,
		"mutatingadmissionpolicybindings", ""},
}

// Kinds of parameters, and what bindings select.
const (
	mapKind, noKind = "v1 ConfigMap", "apps/v1 Gizmo"
	one, everywhere = `{"name":"limits","namespace":"default",`, `{"name":"limits",`
	some, selected  = `{"selector":{"matchLabels":{"a":"b"}},"namespace":"default",`, `{"selector":{"matchLabels":{"a":"b"}},`
)

func policyBody(form int, name, label, params string) string {
	f, kind := &policyForms[form], ""
	if version, of, ok := strings.Cut(params, " "); ok {
		kind = fmt.Sprintf(`"paramKind":{"apiVersion":%q,"kind":%q},`, version, of)
	}
	return fmt.Sprintf(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":%q,"metadata":{"name":%q,"labels":{"l":%q}},"spec":{%s%s,
		"matchConstraints":{"resourceRules":[{"apiGroups":[""],"apiVersions":["v1"],"operations":["CREATE"],"resources":["pods"]}]}}}`,
		f.kind, name, label, kind, f.policy)
}

func bindingBody(form int, name, label, policy, ref string) string {
	f := &policyForms[form]
	if ref != "" {
		ref = `"paramRef":` + ref + `"parameterNotFoundAction":"Deny"},`
	}
	return fmt.Sprintf(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":%q,"metadata":{"name":%q,"labels":{"l":%q}},"spec":{%s%s"policyName":%q}}`,
		f.kind+"Binding", name, label, ref, f.binding, policy)
}

// author is a user who may write all policies and bindings and has further rights in a namespace
// ("" = all).
type author struct {
	name, namespace string
	verbs           string
	group, resource string
	named           []string
}

var authors = []author{
	{name: "nobody", verbs: "get", resource: "nodes"},
	{name: "reads", verbs: "get", resource: "configmaps"},
	{name: "reads-one", namespace: "default", verbs: "get", resource: "configmaps", named: []string{"limits"}},
	{name: "reads-named", verbs: "get", resource: "configmaps", named: []string{"limits"}},
	{name: "reads-space", namespace: "default", verbs: "get list", resource: "configmaps"},
	{name: "lists", verbs: "list", resource: "configmaps"},
	{name: "reads-apps", verbs: "get list", group: "apps", resource: "*"},
	{name: "reads-all", verbs: "get list", group: "*", resource: "*"},
}

// hire grants the authors their rights. It returns a client of each author and of an administrator.
func hire(t *testing.T, r *replica) map[string]*http.Client {
	admin := r.admin().RbacV1()
	create := metav1.CreateOptions{}
	for _, a := range authors {
		own := rbacv1.PolicyRule{Verbs: []string{"*"}, APIGroups: []string{"admissionregistration.k8s.io"}, Resources: []string{"*"}}
		rule := rbacv1.PolicyRule{Verbs: strings.Fields(a.verbs), APIGroups: []string{a.group}, Resources: []string{a.resource}, ResourceNames: a.named}
		for name, rule := range map[string]rbacv1.PolicyRule{a.name + "-writes": own, a.name: rule} {
			role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{rule}}
			_, err := admin.ClusterRoles().Create(within(t), role, create)
			bound := roleBinding(a.namespace, name, "ClusterRole", name, userSubject(a.name))
			if err == nil && a.namespace != "" && name == a.name {
				_, err = admin.RoleBindings(a.namespace).Create(within(t), bound, create)
			} else if err == nil {
				_, err = admin.ClusterRoleBindings().Create(within(t), &rbacv1.ClusterRoleBinding{
					ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: bound.RoleRef, Subjects: bound.Subjects}, create)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	clients := map[string]*http.Client{"root": r.sameAdmin()}
	for _, a := range authors {
		cert := r.cert(pki.Client(a.name))
		clients[a.name] = r.http(&cert)
		eventually(t, func() error {
			u, name := api.User{Name: a.name}, strings.Join(a.named, "")
			verb, _, _ := strings.Cut(a.verbs, " ")
			reads, _ := r.known.may(within(t), u, verb, schema.GroupVersionResource{Group: a.group, Resource: a.resource}, "", a.namespace, name)
			writes, _ := r.known.may(within(t), u, "create", schema.GroupVersionResource{
				Group: "admissionregistration.k8s.io", Resource: "validatingadmissionpolicies"}, "", "", "")
			if !reads || !writes {
				return fmt.Errorf("%s reads %t, writes %t", a.name, reads, writes)
			}
			return nil
		})
	}
	return clients
}

// tried sends a dry run and compares the error message with words; "" = success.
func tried(t *testing.T, r *replica, c *http.Client, method, path, body, words string, headers ...string) {
	t.Helper()
	if method == "PUT" {
		body = atItsVersion(t, r, strings.TrimSuffix(path, "/status"), body)
	}
	got := r.call(c, method, policyPath+path+"?dryRun=All&fieldManager=m", body, headers...)
	switch {
	case words != "":
		refused(t, got, http.StatusUnprocessableEntity, words)
	case got.code != http.StatusOK && got.code != http.StatusCreated:
		t.Errorf("%s %s: %d %s", method, path, got.code, got.body)
	}
}

// atItsVersion returns the body of an update with the resourceVersion of the current object, which
// the update requires.
func atItsVersion(t *testing.T, r *replica, path, body string) string {
	t.Helper()
	var have, next map[string]any
	got := r.call(r.sameAdmin(), "GET", policyPath+path, "")
	if err := errors.Join(json.Unmarshal([]byte(got.body), &have), json.Unmarshal([]byte(body), &next)); err != nil {
		t.Fatalf("%s: %d %s: %v", path, got.code, got.body, err)
	}
	next["metadata"].(map[string]any)["resourceVersion"] = have["metadata"].(map[string]any)["resourceVersion"]
	out, err := json.Marshal(next)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func stands(t *testing.T, r *replica, c *http.Client, path, body string) {
	t.Helper()
	if got := r.call(c, "POST", policyPath+path, body); got.code != http.StatusCreated {
		t.Fatalf("%s: %d %s", path, got.code, got.body)
	}
}

// Who writes a policy with parameters must be able to read all objects of their kind.
func TestPolicyParamKindNeedsRead(t *testing.T) {
	r := start(t, nil)
	clients := hire(t, r)
	for _, c := range []struct{ params, readers string }{
		{"", "nobody reads reads-one reads-named reads-space lists reads-apps reads-all root"},
		{mapKind, "reads reads-all root"},
		{noKind, "reads-apps reads-all root"}, // no such kind: any of its group
		{"x.io/v1 Y", "reads-all root"},
	} {
		readers := strings.Fields(c.readers)
		for form := range policyForms {
			f := &policyForms[form]
			same := fmt.Sprintf("same%d", len(c.params))
			stands(t, r, clients["root"], f.policies, policyBody(form, same, "a", c.params))
			if c.params == "" {
				stands(t, r, clients["root"], f.policies, policyBody(form, "bare", "a", ""))
				stands(t, r, clients["root"], f.policies, policyBody(form, "other", "a", "v1 Secret"))
			}
			for who, client := range clients {
				t.Run(f.kind+"/"+c.params+"/"+who, func(t *testing.T) {
					words := ""
					if version, kind, ok := strings.Cut(c.params, " "); ok && !slices.Contains(readers, who) {
						words = fmt.Sprintf(`is invalid: spec.paramKind: Forbidden: user %q must have "get" permission on all objects of the referenced `+
							`paramKind (kind=%s, apiVersion=%s)`, who, kind, version)
					}
					tried(t, r, client, "POST", f.policies, policyBody(form, "new", "a", c.params), words)
					tried(t, r, client, "PATCH", f.policies+"/new", policyBody(form, "new", "a", c.params), words, "Content-Type", "application/apply-patch+yaml")
					for _, from := range []string{"bare", "other"} {
						body := policyBody(form, from, "a", c.params)
						tried(t, r, client, "PUT", f.policies+"/"+from, body, words)
						tried(t, r, client, "PATCH", f.policies+"/"+from, body, words, "Content-Type", "application/merge-patch+json")
					}
					tried(t, r, client, "PUT", f.policies+"/"+same, policyBody(form, same, "changed", c.params), "")
					tried(t, r, client, "PUT", f.policies+"/"+same, policyBody(form, same, "changed", ""), "")
					if form == 0 {
						tried(t, r, client, "PUT", f.policies+"/"+same+"/status", policyBody(form, same, "a", mapKind), "")
					}
				})
			}
		}
	}
}

// Who binds a policy to parameters must be able to read them.
func TestPolicyParamRefNeedsRead(t *testing.T) {
	r := start(t, nil)
	clients := hire(t, r)
	root := clients["root"]
	all := "nobody reads reads-one reads-named reads-space lists reads-apps reads-all root"
	for form := range policyForms {
		f := &policyForms[form]
		for name, params := range map[string]string{"maps": mapKind, "gizmos": noKind, "secrets": "v1 Secret", "bare": ""} {
			stands(t, r, root, f.policies, policyBody(form, name, "a", params))
		}
		stands(t, r, root, f.bindings, bindingBody(form, "free", "a", "maps", ""))
		stands(t, r, root, f.bindings, bindingBody(form, "moved", "a", "maps", `{"name":"other","namespace":"default",`))
		for i, c := range []struct{ policy, ref, readers, unknown string }{
			{"maps", "", all, ""},
			{"maps", one, "reads reads-one reads-named reads-space reads-all root", ""},
			{"maps", everywhere, "reads reads-named reads-all root", ""},
			{"maps", some, "reads-space lists reads-all root", ""},
			{"maps", selected, "lists reads-all root", ""},
			{"secrets", one, "reads-all root", ""},
			{"bare", one, "reads-all root", ""},
			{"gizmos", one, "reads-apps reads-all root", "unable to resolve paramKind apps/v1 Gizmo"},
			{"none", one, "reads-all root", "unable to get policy none"},
		} {
			readers := strings.Fields(c.readers)
			same := fmt.Sprintf("same%d", i)
			stands(t, r, root, f.bindings, bindingBody(form, same, "a", c.policy, c.ref))
			stands(t, r, root, f.bindings, bindingBody(form, "bound-"+same, "a", "elsewhere", c.ref))
			for who, client := range clients {
				t.Run(fmt.Sprintf("%s/%s %s/%s", f.kind, c.policy, c.ref, who), func(t *testing.T) {
					words := ""
					if !slices.Contains(readers, who) {
						words = refusedRef(who, c.ref, c.unknown)
					}
					tried(t, r, client, "POST", f.bindings, bindingBody(form, "new", "a", c.policy, c.ref), words)
					tried(t, r, client, "PATCH", f.bindings+"/new", bindingBody(form, "new", "a", c.policy, c.ref), words,
						"Content-Type", "application/apply-patch+yaml")
					for _, from := range []string{"free", "moved", "bound-" + same} { // the ref is new, another, of another policy
						tried(t, r, client, "PUT", f.bindings+"/"+from, bindingBody(form, from, "a", c.policy, c.ref), words)
					}
					tried(t, r, client, "PUT", f.bindings+"/"+same, bindingBody(form, same, "changed", c.policy, c.ref), "")
					tried(t, r, client, "PUT", f.bindings+"/"+same, bindingBody(form, same, "changed", c.policy, ""), "")
				})
			}
		}
	}
}

func refusedRef(who, ref, unknown string) string {
	verb := "get"
	if strings.Contains(ref, "selector") {
		verb = "list"
	}
	words := fmt.Sprintf("user %q does not have %q permission on the object referenced by paramRef", who, verb)
	if unknown != "" {
		words = fmt.Sprintf("%s to determine minimum required permissions and user %q does not have %q permission for all groups, "+
			"versions and resources", unknown, who, verb)
	}
	return "is invalid: spec.paramRef: Forbidden: " + words
}
