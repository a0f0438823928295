package builtin_test

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

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authz"
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
	some, selected  = `{"selector":{"matchLabels":{"a":"b"}},"namespace":"default",`,
		`{"selector":{"matchLabels":{"a":"b"}},`
)

func policyBody(form int, name, label, params string) string {
	f, kind := &policyForms[form], ""
	if version, of, ok := strings.Cut(params, " "); ok {
		kind = fmt.Sprintf(`"paramKind":{"apiVersion":%q,"kind":%q},`, version, of)
	}
	return fmt.Sprintf(
		`{"apiVersion":"admissionregistration.k8s.io/v1","kind":%q,"metadata":{"name":%q,"labels":{"l":%q}},"spec":{%s%s,
		"matchConstraints":{"resourceRules":[{"apiGroups":[""],"apiVersions":["v1"],"operations":["CREATE"],"resources":["pods"]}]}}}`,
		f.kind, name, label, kind, f.policy)
}

func bindingBody(form int, name, label, policy, ref string) string {
	f := &policyForms[form]
	if ref != "" {
		ref = `"paramRef":` + ref + `"parameterNotFoundAction":"Deny"},`
	}
	return fmt.Sprintf(`{"apiVersion":"admissionregistration.k8s.io/v1","kind":%q,"metadata":{"name":%q,`+
		`"labels":{"l":%q}},"spec":{%s%s"policyName":%q}}`,
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

// grantRights grants the authors their rights. It returns a client of each author and of an
// administrator.
func grantRights(t *testing.T, r *apiservertest.Replica) map[string]*http.Client {
	admin := r.Admin().RbacV1()
	create := metav1.CreateOptions{}
	for _, a := range authors {
		own := rbacv1.PolicyRule{Verbs: []string{"*"}, APIGroups: []string{"admissionregistration.k8s.io"},
			Resources: []string{"*"}}
		rule := rbacv1.PolicyRule{Verbs: strings.Fields(a.verbs), APIGroups: []string{a.group},
			Resources: []string{a.resource}, ResourceNames: a.named}
		for name, rule := range map[string]rbacv1.PolicyRule{a.name + "-writes": own, a.name: rule} {
			role := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: []rbacv1.PolicyRule{rule}}
			_, err := admin.ClusterRoles().Create(apiservertest.Within(t), role, create)
			bound := apiservertest.RoleBinding(a.namespace, name, "ClusterRole", name,
				apiservertest.UserSubject(a.name))
			if err == nil && a.namespace != "" && name == a.name {
				_, err = admin.RoleBindings(a.namespace).Create(apiservertest.Within(t), bound, create)
			} else if err == nil {
				_, err = admin.ClusterRoleBindings().Create(apiservertest.Within(t), &rbacv1.ClusterRoleBinding{
					ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: bound.RoleRef, Subjects: bound.Subjects},
					create)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	clients := map[string]*http.Client{"root": r.SameAdmin()}
	for _, a := range authors {
		cert := r.Cert(pki.Client(a.name))
		clients[a.name] = r.HTTP(&cert)
		apiservertest.Eventually(t, func() error {
			u, name := api.User{Name: a.name}, strings.Join(a.named, "")
			verb, _, _ := strings.Cut(a.verbs, " ")
			reads, _ := r.Server.Authorizer().Authorize(apiservertest.Within(t), &authz.Attributes{
				User: u, Verb: verb, APIGroup: a.group, Resource: a.resource, Namespace: a.namespace, Name: name,
			})
			writes, _ := r.Server.Authorizer().Authorize(apiservertest.Within(t), &authz.Attributes{
				User: u, Verb: "create", APIGroup: "admissionregistration.k8s.io",
				Resource: "validatingadmissionpolicies",
			})
			if reads != authz.Allow || writes != authz.Allow {
				return fmt.Errorf("%s reads: %v, writes: %v", a.name, reads, writes)
			}
			return nil
		})
	}
	return clients
}

// checkDryRun sends a dry run and compares the error message with words; "" = success.
func checkDryRun(
	t *testing.T, r *apiservertest.Replica, c *http.Client, method, path, body, words string, headers ...string,
) {
	t.Helper()
	if method == "PUT" {
		body = withCurrentVersion(t, r, strings.TrimSuffix(path, "/status"), body)
	}
	got := r.Call(c, method, policyPath+path+"?dryRun=All&fieldManager=m", body, headers...)
	switch {
	case words != "":
		apiservertest.Refused(t, got, http.StatusUnprocessableEntity, words)
	case got.Code != http.StatusOK && got.Code != http.StatusCreated:
		t.Errorf("%s %s: %d %s", method, path, got.Code, got.Body)
	}
}

// withCurrentVersion returns the body of an update with the resourceVersion of the current object,
// which the update requires.
func withCurrentVersion(t *testing.T, r *apiservertest.Replica, path, body string) string {
	t.Helper()
	var have, next map[string]any
	got := r.Call(r.SameAdmin(), "GET", policyPath+path, "")
	if err := errors.Join(json.Unmarshal([]byte(got.Body), &have), json.Unmarshal([]byte(body), &next)); err != nil {
		t.Fatalf("%s: %d %s: %v", path, got.Code, got.Body, err)
	}
	next["metadata"].(map[string]any)["resourceVersion"] = have["metadata"].(map[string]any)["resourceVersion"]
	out, err := json.Marshal(next)
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

func stands(t *testing.T, r *apiservertest.Replica, c *http.Client, path, body string) {
	t.Helper()
	if got := r.Call(c, "POST", policyPath+path, body); got.Code != http.StatusCreated {
		t.Fatalf("%s: %d %s", path, got.Code, got.Body)
	}
}

// A user who writes a policy with a paramKind must be allowed to read all objects of that kind.
func TestPolicyParamKindNeedsRead(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	clients := grantRights(t, r)
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
						words = fmt.Sprintf(`is invalid: spec.paramKind: Forbidden: user %q must have "get" `+
							`permission on all objects of the referenced `+
							`paramKind (kind=%s, apiVersion=%s)`, who, kind, version)
					}
					checkDryRun(t, r, client, "POST", f.policies, policyBody(form, "new", "a", c.params), words)
					checkDryRun(t, r, client, "PATCH", f.policies+"/new", policyBody(form, "new", "a", c.params), words,
						"Content-Type", "application/apply-patch+yaml")
					for _, from := range []string{"bare", "other"} {
						body := policyBody(form, from, "a", c.params)
						checkDryRun(t, r, client, "PUT", f.policies+"/"+from, body, words)
						checkDryRun(t, r, client, "PATCH", f.policies+"/"+from, body, words, "Content-Type",
							"application/merge-patch+json")
					}
					checkDryRun(t, r, client, "PUT", f.policies+"/"+same, policyBody(form, same, "changed", c.params),
						"")
					checkDryRun(t, r, client, "PUT", f.policies+"/"+same, policyBody(form, same, "changed", ""), "")
					if form == 0 {
						checkDryRun(t, r, client, "PUT", f.policies+"/"+same+"/status",
							policyBody(form, same, "a", mapKind), "")
					}
				})
			}
		}
	}
}

// A user who binds a policy to parameters must be allowed to read the parameters.
func TestPolicyParamRefNeedsRead(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	clients := grantRights(t, r)
	root := clients["root"]
	all := "nobody reads reads-one reads-named reads-space lists reads-apps reads-all root"
	for form := range policyForms {
		f := &policyForms[form]
		for name, params := range map[string]string{"maps": mapKind, "gizmos": noKind,
			"secrets": "v1 Secret", "bare": ""} {
			stands(t, r, root, f.policies, policyBody(form, name, "a", params))
		}
		stands(t, r, root, f.bindings, bindingBody(form, "free", "a", "maps", ""))
		stands(t, r, root, f.bindings, bindingBody(form, "moved", "a", "maps",
			`{"name":"other","namespace":"default",`))
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
					checkDryRun(t, r, client, "POST", f.bindings, bindingBody(form, "new", "a", c.policy, c.ref), words)
					checkDryRun(t, r, client, "PATCH", f.bindings+"/new",
						bindingBody(form, "new", "a", c.policy, c.ref), words,
						"Content-Type", "application/apply-patch+yaml")
					for _, from := range []string{"free", "moved", "bound-" + same} {
						// the ref is new, another, of another policy
						checkDryRun(t, r, client, "PUT", f.bindings+"/"+from,
							bindingBody(form, from, "a", c.policy, c.ref), words)
					}
					checkDryRun(t, r, client, "PUT", f.bindings+"/"+same,
						bindingBody(form, same, "changed", c.policy, c.ref), "")
					checkDryRun(t, r, client, "PUT", f.bindings+"/"+same,
						bindingBody(form, same, "changed", c.policy, ""), "")
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
		words = fmt.Sprintf("%s to determine minimum required permissions and user %q does not have %q permission "+
			"for all groups, "+
			"versions and resources", unknown, who, verb)
	}
	return "is invalid: spec.paramRef: Forbidden: " + words
}
