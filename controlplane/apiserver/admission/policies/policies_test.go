package policies

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	arv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/applyconfigurations"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/internal/memory/memtest"
)

// objects contains the namespaces and parameters of a test.
type objects map[string]api.Object

func (o objects) Get(_ context.Context, resource, namespace, name string) (api.Object, bool) {
	out, ok := o[resource+"/"+namespace+"/"+name]
	return out, ok
}

func (o objects) GetObject(_ context.Context, k *api.Kind, namespace, name string) (api.Object, error) {
	return o[k.Resource+"/"+namespace+"/"+name], nil
}

func (o objects) ListObjects(_ context.Context, k *api.Kind, namespace string, s labels.Selector) (
	out []api.Object, _ error,
) {
	for _, name := range []string{"p1", "p2", "p3"} {
		if one := o[k.Resource+"/"+namespace+"/"+name]; one != nil && s.Matches(labels.Set(one.GetLabels())) {
			out = append(out, one)
		}
	}
	return out, nil
}

// jane is an authorizer that allows only delete.
type jane struct{}

func (jane) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == "jane" && a.GetVerb() == "delete" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "no", nil
}

var converter = sync.OnceValue(func() managedfields.TypeConverter {
	return applyconfigurations.NewTypeConverter(api.Scheme())
})

// environments are shared by the tests because they take long to create.
var environments = sync.OnceValue(func() *cel.Admission { return cel.New().Admission() })

func newPolicies(t testing.TB, in objects) *Policies {
	t.Helper()
	all := objects{
		"namespaces//default": &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default",
			Labels: map[string]string{"env": "prod"}}},
	}
	for key, o := range in {
		all[key] = o
	}
	return New(Config{
		Versions: matching.Versions{Kinds: kinds.All()}, Cluster: all, Params: all,
		Expressions: environments(), Metrics: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler),
		Authorizer: func(context.Context) authorizer.UnconditionalAuthorizer { return jane{} },
		Types:      func(*api.Kind) managedfields.TypeConverter { return converter() },
	})
}

// everything matches all resources.
func everything() *arv1.MatchResources {
	return &arv1.MatchResources{ResourceRules: []arv1.NamedRuleWithOperations{
		{RuleWithOperations: arv1.RuleWithOperations{
			Operations: []arv1.OperationType{"*"},
			Rule:       arv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*"}},
		}}}}
}

func policyOf(name string, validations ...arv1.Validation) *arv1.ValidatingAdmissionPolicy {
	return &arv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: arv1.ValidatingAdmissionPolicySpec{
			MatchConstraints: everything(), Validations: validations,
		}}
}

func bindingOf(policy string, actions ...arv1.ValidationAction) *arv1.ValidatingAdmissionPolicyBinding {
	if len(actions) == 0 {
		actions = []arv1.ValidationAction{arv1.Deny}
	}
	return &arv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: policy + "-b"},
		Spec: arv1.ValidatingAdmissionPolicyBindingSpec{PolicyName: policy, ValidationActions: actions}}
}

func (p *Policies) add(o api.Object) {
	role := map[string]string{
		"*v1.ValidatingAdmissionPolicy":        "validatingadmissionpolicies",
		"*v1.ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
		"*v1.MutatingAdmissionPolicy":          "mutatingadmissionpolicies",
		"*v1.MutatingAdmissionPolicyBinding":   "mutatingadmissionpolicybindings",
	}[fmt.Sprintf("%T", o)]
	p.Sinks()[role].Set(o)
}

// podAttempt returns the creation of a pod with two containers.
func podAttempt() *matching.Attempt {
	return &matching.Attempt{
		User: api.User{Name: "jane", Groups: []string{"dev", "system:authenticated"},
			Extra: map[string][]string{"s": {"a"}}},
		Operation: api.Create, Kind: schema.GroupVersionKind{Version: "v1", Kind: "Pod"},
		Resource: schema.GroupVersionResource{Version: "v1", Resource: "pods"}, Namespace: "default", Name: "p",
		Object: &corev1.Pod{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
			ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", UID: "u",
				Labels: map[string]string{"app": "x"}, Annotations: map[string]string{"limit": "5"}},
			Spec: corev1.PodSpec{Containers: []corev1.Container{
				{Name: "c", Image: "docker.io/a:1", Env: []corev1.EnvVar{{Name: "A", Value: "1"}}},
				{Name: "d", Image: "example.com/b@sha256:0"},
			}, Priority: new(int32(7))},
		},
		Options: &metav1.CreateOptions{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "CreateOptions"}},
	}
}

const registry = "object.spec.containers.all(c, c.image.startsWith('example.com/'))"

// Expressions from the documentation of Kubernetes and from its users: true admits, false denies,
// and an evaluation error is an error.
func TestExpressions(t *testing.T) {
	const yes, no, broken = "", "failed expression", "error"
	for i, tc := range []struct{ text, want string }{
		{"true", yes}, {"false", no},
		{"object.spec.containers.size() <= 5", yes}, {"object.spec.containers.size() == 1", no},
		{registry, no}, {"object.spec.containers.exists(c, c.image.startsWith('example.com/'))", yes},
		{"object.spec.containers.exists_one(c, c.name == 'c')", yes},
		{"object.spec.containers.map(c, c.name) == ['c', 'd']", yes},
		{"object.spec.containers.filter(c, has(c.env)).size() == 1", yes},
		{"!object.spec.containers.exists(c, has(c.securityContext) && has(c.securityContext.privileged) && " +
			"c.securityContext.privileged)", yes},
		{"object.spec.containers.all(c, has(c.resources) && has(c.resources.limits))", no},
		{"has(object.spec.hostNetwork)", no}, {"!has(object.spec.hostNetwork) || !object.spec.hostNetwork", yes},
		{"object.spec.priority == 7", yes}, {"object.spec.priority >= 8", no},
		{"object.metadata.name.matches('^[a-z]$')", yes}, {"object.metadata.name == 'q'", no},
		{"'app' in object.metadata.labels", yes}, {"'team' in object.metadata.labels", no},
		{"object.metadata.labels['app'] == 'x'", yes}, {"object.metadata.labels.all(k, k == 'app')", yes},
		{"object.metadata.?labels[?'team'].orValue('none') == 'none'", yes},
		{"object.?spec.?hostPID.hasValue()", no},
		{"int(object.metadata.annotations.limit) < 6", yes},
		{"object.kind == 'Pod' && object.apiVersion == 'v1'", yes},
		{"oldObject == null", yes}, {"oldObject != null", no},
		{"request.operation == 'CREATE'", yes}, {"request.operation in ['UPDATE', 'DELETE']", no},
		{"request.kind.kind == 'Pod' && request.kind.group == '' && request.kind.version == 'v1'", yes},
		{"request.resource.resource == 'pods' && request.requestResource.resource == 'pods'", yes},
		{"request.name == 'p' && request.namespace == 'default'", yes},
		{"request.userInfo.username == 'jane'", yes}, {"'dev' in request.userInfo.groups", yes},
		{"request.userInfo.extra['s'][0] == 'a'", yes}, {"!request.dryRun", yes},
		{"request.options.kind == 'CreateOptions'", yes},
		{"!('system:masters' in request.userInfo.groups)", yes},
		{"namespaceObject.metadata.name == 'default'", yes}, {"namespaceObject.metadata.labels.env == 'prod'", yes},
		{"namespaceObject.metadata.labels.env == 'test'", no},
		{"authorizer.group('').resource('pods').namespace('default').name('p').check('delete').allowed()", yes},
		{"authorizer.group('').resource('pods').namespace('default').check('create').allowed()", no},
		{"authorizer.requestResource.check('delete').allowed()", yes},
		{"authorizer.requestResource.check('custom-verb').allowed()", no},
		{"authorizer.serviceAccount('default', 'sa').group('').resource('pods').check('delete').allowed()", no},
		{"authorizer.path('/healthz').check('get').allowed()", no},
		{"authorizer.requestResource.check('create').reason() == 'no'", yes},
		{"quantity('100Mi').isLessThan(quantity('1Gi'))", yes},
		{"quantity('2Gi').compareTo(quantity('1Gi')) == -1", no},
		{"isQuantity('1.5Gi')", yes}, {"url('https://example.com:8080/a').getHostname() == 'example.com'", yes},
		{"ip('10.0.0.1').family() == 4", yes}, {"cidr('10.0.0.0/8').containsIP('10.1.2.3')", yes},
		{"cidr('10.0.0.0/8').containsIP('11.1.2.3')", no},
		{"'a,b'.split(',') == ['a', 'b']", yes}, {"'Abc'.lowerAscii() == 'abc'", yes},
		{"'abc'.find('b+') == 'b'", yes}, {"['b', 'a'].isSorted()", no}, {"[1, 2, 3].sum() == 6", yes},
		{"[1, 2].max() == 2 && [3, 1].min() == 1", yes}, {"sets.contains([1, 2], [1])", yes},
		{"semver('1.2.3').isGreaterThan(semver('1.2.0'))", yes},
		{"format.dns1123Label().validate('a-b').hasValue()", no},
		{"timestamp('2026-01-01T00:00:00Z') < timestamp('2027-01-01T00:00:00Z')", yes},
		{"duration('1h') > duration('59m')", yes},
		{"object.spec.containers[0].env[0].value == '1'", yes},
		{"object.spec.containers[5].name == 'x'", broken}, {"object.metadata.labels.team == 'x'", broken},
		{"object.spec.nothing.deeper", broken}, {"1 / 0 == 1", broken},
		{"object.spec.containers.size()", broken}, {"no_such_variable", broken}, {"this is", broken},
		{"params.x == 1", broken},
		{"request.nothing == ''", broken},
	} {
		for _, policy := range []arv1.FailurePolicyType{arv1.Fail, arv1.Ignore} {
			p := newPolicies(t, nil)
			v := policyOf("v", arv1.Validation{Expression: tc.text})
			v.Spec.FailurePolicy = &policy
			p.add(v)
			p.add(bindingOf("v"))
			err := p.Validate(t.Context(), podAttempt())
			want := tc.want
			if want == broken && policy == arv1.Ignore {
				want = yes
			}
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%d %s, %s: %v", i, tc.text, policy, err)
			}
		}
	}
}

// Denials have the message format and reason codes of Kubernetes. The message comes from
// messageExpression, message or the expression, in this order.
func TestDenials(t *testing.T) {
	for _, tc := range []struct {
		v    arv1.Validation
		want string
		code int32
	}{
		{arv1.Validation{Expression: "false"}, "failed expression: false", 422},
		{arv1.Validation{Expression: "false", Message: " no "}, "no", 422},
		{arv1.Validation{Expression: "false", Message: "no", MessageExpression: "'pod ' + object.metadata.name"},
			"pod p", 422},
		{arv1.Validation{Expression: "false", Message: "no", MessageExpression: "object.nothing"}, "no", 422},
		{arv1.Validation{Expression: "false", Message: "no", MessageExpression: "''"}, "no", 422},
		{arv1.Validation{Expression: "false", Message: "no", MessageExpression: "'two\\nlines'"}, "no", 422},
		{arv1.Validation{Expression: "false", Message: "no",
			MessageExpression: "authorizer.requestResource.check('x').reason()"}, "no", 422},
		{arv1.Validation{Expression: "false", Reason: new(metav1.StatusReasonForbidden)},
			"failed expression: false", 403},
		{arv1.Validation{Expression: "false", Reason: new(metav1.StatusReasonUnauthorized)},
			"failed expression: false", 401},
		{arv1.Validation{Expression: "false", Reason: new(metav1.StatusReasonRequestEntityTooLarge)},
			"failed expression: false", 413},
	} {
		p := newPolicies(t, nil)
		p.add(policyOf("v", arv1.Validation{Expression: "true"}, tc.v))
		p.add(bindingOf("v"))
		err := p.Validate(t.Context(), podAttempt())
		want := `pods "p" is forbidden: ValidatingAdmissionPolicy 'v' with binding 'v-b' denied request: ` + tc.want
		status, ok := err.(*apierrors.StatusError)
		if !ok || status.ErrStatus.Message != want || status.ErrStatus.Code != tc.code ||
			len(status.ErrStatus.Details.Causes) != 1 {
			t.Errorf("%+v: %v", tc.v, err)
		}
	}
}

type notes map[string]string

func (n notes) Annotate(key, value string)        { n[key] = value }
func (n notes) AnnotateContent(key, value string) { n[key] = value }

// Variables, conditions, actions and audit annotations.
func TestPolicyParts(t *testing.T) {
	p := newPolicies(t, nil)
	v := policyOf("v", arv1.Validation{Expression: "variables.images.all(i, i in variables.allowed)",
		MessageExpression: "'images ' + variables.images.join(',')"})
	v.Spec.Variables = []arv1.Variable{
		{Name: "containers", Expression: "object.spec.containers"},
		{Name: "images", Expression: "variables.containers.map(c, c.image)"},
		{Name: "allowed", Expression: "['a']"}, {Name: "unused", Expression: "object.nothing"},
	}
	v.Spec.AuditAnnotations = []arv1.AuditAnnotation{
		{Key: "images", ValueExpression: "'n=' + string(variables.images.size())"},
		{Key: "none", ValueExpression: "null"},
	}
	p.add(v)
	p.add(bindingOf("v", arv1.Warn, arv1.Audit))
	n := notes{}
	ctx, warnings := api.WithWarnings(api.WithAnnotator(t.Context(), n))
	if err := p.Validate(ctx, podAttempt()); err != nil {
		t.Fatal(err)
	}
	if w := warnings(); len(w) != 1 || w[0] !=
		"Validation failed for ValidatingAdmissionPolicy 'v' with binding 'v-b': images "+
			"docker.io/a:1,example.com/b@sha256:0" {
		t.Errorf("%q", w)
	}
	if len(n) != 2 || n["v/images"] != "n=2" || n["validation.policy.admission.k8s.io/validation_failure"] !=
		`[{"message":"images docker.io/a:1,example.com/b@sha256:0","policy":"v","binding":"v-b","expressionIndex":0,`+
			`"validationActions":["Warn","Audit"]}]` {
		t.Errorf("%q", n)
	}
	for condition, asked := range map[string]bool{"request.operation == 'CREATE'": true,
		"variables.containers.size() == 3": false} {
		v.Spec.MatchConditions = []arv1.MatchCondition{{Name: "c", Expression: condition}}
		p.add(v)
		p.add(bindingOf("v"))
		if err := p.Validate(t.Context(), podAttempt()); (err != nil) != asked {
			t.Errorf("%s: %v", condition, err)
		}
	}
	v.Spec.MatchConditions[0].Expression = "object.nothing == 1"
	p.add(v)
	if err := p.Validate(t.Context(), podAttempt()); err == nil ||
		!strings.Contains(err.Error(), "no such key: nothing") {
		t.Errorf("%v", err)
	}
}

// Parameters are selected by name or selector, in the namespace of the attempt or another one; the
// case without parameters is included.
func TestParams(t *testing.T) {
	param := func(name, limit string) *corev1.ConfigMap {
		return &corev1.ConfigMap{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"set": "s"}},
			Data:       map[string]string{"limit": limit}}
	}
	in := objects{
		"configmaps/default/p1": param("p1", "5"), "configmaps/default/p2": param("p2", "1"),
		"configmaps/other/p1": param("p1", "0"),
	}
	for i, tc := range []struct {
		ref  arv1.ParamRef
		kind string
		want string
	}{
		{arv1.ParamRef{Name: "p1"}, "ConfigMap", ""},
		{arv1.ParamRef{Name: "p2"}, "ConfigMap", "2 of 1"},
		{arv1.ParamRef{Name: "p1", Namespace: "other"}, "ConfigMap", "2 of 0"},
		{arv1.ParamRef{Selector: &metav1.LabelSelector{}}, "ConfigMap", "2 of 1"},
		{arv1.ParamRef{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"set": "t"}}}, "ConfigMap", ""},
		{arv1.ParamRef{Name: "gone", ParameterNotFoundAction: new(arv1.AllowAction)}, "ConfigMap", ""},
		{arv1.ParamRef{Name: "gone", ParameterNotFoundAction: new(arv1.DenyAction)}, "ConfigMap",
			"failed to configure binding: no params found for policy binding with `Deny` parameterNotFoundAction"},
		{arv1.ParamRef{Name: "p1"}, "Unknown", "not known"},
		{arv1.ParamRef{Name: "p1", Namespace: "x"}, "Node", "must not be provided for a cluster-scoped"},
	} {
		p := newPolicies(t, in)
		v := policyOf("v", arv1.Validation{Expression: "object.spec.containers.size() <= int(params.data.limit)",
			MessageExpression: "string(object.spec.containers.size()) + ' of ' + params.data.limit"})
		v.Spec.ParamKind = &arv1.ParamKind{APIVersion: "v1", Kind: tc.kind}
		p.add(v)
		b := bindingOf("v")
		b.Spec.ParamRef = &tc.ref
		p.add(b)
		err := p.Validate(t.Context(), podAttempt())
		if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
			t.Errorf("%d: %v", i, err)
		}
	}
}

// An expression that exceeds the budget is stopped and denies the request. The same applies to many
// cheap expressions together.
func TestCostBombs(t *testing.T) {
	list := "[" + strings.Repeat("1,", 60) + "1]"
	bomb := strings.Repeat(list+".all(x, ", 5) + "true" + strings.Repeat(")", 5)
	p := newPolicies(t, nil)
	p.add(policyOf("v", arv1.Validation{Expression: bomb}))
	p.add(bindingOf("v"))
	if err := p.Validate(t.Context(), podAttempt()); err == nil ||
		!strings.Contains(err.Error(), "cost limit exceeded") {
		t.Errorf("%v", err)
	}
	// Each is below the limit of an expression; together they exceed the budget of a policy.
	cheap := strings.Repeat(list+".all(x, ", 3) + "true" + strings.Repeat(")", 3)
	var many []arv1.Validation
	for range 40 {
		many = append(many, arv1.Validation{Expression: cheap})
	}
	p.add(policyOf("v", many...))
	if err := p.Validate(t.Context(), podAttempt()); err == nil ||
		!strings.Contains(err.Error(), "running out of cost budget") {
		t.Errorf("%v", err)
	}
	v := policyOf("v", arv1.Validation{Expression: "variables.a39"})
	for i := range 40 {
		text := cheap
		if i > 0 {
			text += fmt.Sprintf(" && variables.a%d", i-1)
		}
		v.Spec.Variables = append(v.Spec.Variables, arv1.Variable{Name: fmt.Sprintf("a%d", i), Expression: text})
	}
	p.add(v)
	if err := p.Validate(t.Context(), podAttempt()); err == nil || !strings.Contains(err.Error(), "budget") {
		t.Errorf("%v", err)
	}
}

// 1,000 policies use little memory before they are evaluated, and a limited amount afterwards.
func TestMemoryOfManyPolicies(t *testing.T) {
	p := newPolicies(t, nil)
	p.add(policyOf("warm", arv1.Validation{Expression: "true"}))
	p.add(bindingOf("warm"))
	if err := p.Validate(t.Context(), podAttempt()); err != nil {
		t.Fatal(err)
	}
	before := memtest.LiveHeap()
	for i := range 1000 {
		name := fmt.Sprintf("p%d", i)
		v := policyOf(name, arv1.Validation{Expression: "variables.names.all(n, n != '" + name + "')"})
		v.Spec.Variables = []arv1.Variable{{Name: "names", Expression: "object.spec.containers.map(c, c.name)"}}
		p.add(v)
		p.add(bindingOf(name))
	}
	idle := memtest.LiveHeap()
	if err := p.Validate(t.Context(), podAttempt()); err != nil {
		t.Fatal(err)
	}
	used := memtest.LiveHeap()
	t.Logf("1,000 policies: %d KiB unused, %d KiB used", (idle-before)>>10, (used-before)>>10)
	if idle-before > 8<<20 || used-before > 256<<20 {
		t.Errorf("1,000 policies take %d KiB, and %d KiB when they are used", (idle-before)>>10, (used-before)>>10)
	}
	runtime.KeepAlive(p)
}

// FuzzExpression checks that no expression causes a panic or a long evaluation.
func FuzzExpression(f *testing.F) {
	for _, s := range []string{"", registry, "object.spec.containers.map(c, c.name).join(',') == ''",
		"request.userInfo", "[{}].map(x, x)",
		"object.metadata.labels['a'].matches('(a*)*b')", "variables.x", "'\\u0000'", "Object{spec: Object.spec{}}",
		"1.0/0.0 > 2.0",
		"[JSONPatch{op: 'add', path: '/metadata/labels/x', value: 'y'}]"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) > 4096 {
			return
		}
		p := newPolicies(t, nil)
		v := policyOf("v", arv1.Validation{Expression: text, MessageExpression: text})
		v.Spec.Variables = []arv1.Variable{{Name: "x", Expression: text}}
		v.Spec.MatchConditions = []arv1.MatchCondition{{Name: "c", Expression: text}}
		v.Spec.AuditAnnotations = []arv1.AuditAnnotation{{Key: "k", ValueExpression: text}}
		p.add(v)
		p.add(bindingOf("v"))
		_ = p.Validate(t.Context(), podAttempt())
		p.add(mutatingPolicy("m", "", text))
		p.add(mutatingPolicy("n", text, ""))
		p.add(mutatingBinding("m"))
		p.add(mutatingBinding("n"))
		_ = p.Mutate(t.Context(), podAttempt(), &matching.Rounds{})
	})
}
