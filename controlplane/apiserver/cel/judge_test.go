package cel

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// Each expression is compiled for its use, with the variables allowed there.
func TestJudge(t *testing.T) {
	a := New().Admission()
	at := field.NewPath("at")
	variable := expressions.Expression{Use: expressions.Variable, Name: "v", Text: "object.metadata.name", At: at}
	for _, c := range []struct {
		use    expressions.Use
		text   string
		params bool
		want   string // part of the error; "" = valid
	}{
		{expressions.MatchCondition, "request.operation == 'CREATE'", false, ""},
		{expressions.MatchCondition, "variables.v == 'a'", false, "undeclared reference to 'variables'"},
		{expressions.MatchCondition, "1", false, "must evaluate to bool but got int"},
		{expressions.MatchCondition, "1 +", false, "compilation failed: ERROR: <input>:1:4: Syntax error"},
		{expressions.Validation, "variables.v == 'a'", false, ""},
		{expressions.Validation, "variables.w == 'a'", false, "undefined field 'w'"},
		{expressions.Validation, "params.data.a == 'a'", false, "undeclared reference to 'params'"},
		{expressions.Validation, "params.data.a == 'a'", true, ""},
		{expressions.Validation, "authorizer.path('/healthz').check('get').allowed()", false, ""},
		{expressions.Message, "'no ' + string(variables.v)", false, ""},
		{expressions.Message, "1", false, "must evaluate to string but got int"},
		{expressions.Message, "authorizer.path('/healthz').check('get').reason()", false,
			"undeclared reference to 'authorizer'"},
		{expressions.AuditAnnotation, "null", false, ""},
		{expressions.AuditAnnotation, "true", false, "but got bool"},
		{expressions.PatchMutation, "[JSONPatch{op: 'add', path: '/a', value: 1}]", false, ""},
		{expressions.PatchMutation, "[1]", false, "must evaluate to"},
		{expressions.ApplyMutation, "Object{spec: Object.spec{replicas: 1}}", false, ""},
		{expressions.ApplyMutation, "'a'", false, "must evaluate to"},
		{expressions.DeviceSelector, "device.driver == 'x' && device.attributes['x'].model == 'a' && " +
			"device.capacity['x'].memory.isGreaterThan(quantity('1Gi'))", false, ""},
		{expressions.DeviceSelector, "device.colour == 'red'", false, "undefined field 'colour'"},
		{expressions.DeviceSelector, "object.a", false, "undeclared reference to 'object'"},
		{expressions.DeviceSelector, "device.attributes['x'].ready", false, ""},
		{expressions.DeviceSelector, "device.driver", false, "must evaluate to bool or the unknown type, not string"},
		{expressions.DeviceSelector, "cel.bind(x, device.attributes['x'], x.fast && x.near)", false, ""},
		{expressions.DeviceSelector, "device.attributes['x'].models.includes('a') && " +
			"device.attributes['x'].version.isLessThan(semver('1.2.3'))", false, ""},
		{expressions.DeviceSelector, "device.attributes['x'].models.all(a, a.startsWith('v'))", false, ""},
		{expressions.DerivedValue, "device.attributes['x'].model", false, ""},
	} {
		errs := a.Judge([]expressions.Expression{{Use: variable.Use, Name: variable.Name, Text: variable.Text, At: at,
			Params: c.params}, {Use: c.use, Text: c.text, Params: c.params, At: at}})
		switch {
		case c.want == "" && len(errs) == 0:
		case c.want == "" || len(errs) != 1 || !strings.Contains(errs[0].Detail, c.want) || errs[0].BadValue != c.text:
			t.Errorf("%s: got %v, want %q", c.text, errs, c.want)
		}
	}
	bad := a.Judge([]expressions.Expression{{Use: expressions.Variable, Name: "v", Text: "1 +", At: at}})
	if len(bad) != 1 || !strings.HasPrefix(bad[0].Detail, "compilation failed: ") {
		t.Error(bad)
	}
}

// A device expression that is too costly is rejected, and so are derived values that are too costly
// together.
func TestDeviceCost(t *testing.T) {
	a := New().Admission()
	each := "device.attributes.all(a, device.attributes.all(b, true))"
	nested := "device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, " +
		"device.attributes.all(d, true))))"
	const tooMuch = "at: Forbidden: too complex, exceeds cost limit"
	judge := func(use expressions.Use, texts ...string) string {
		var list []expressions.Expression
		for _, text := range texts {
			list = append(list, expressions.Expression{Use: use, Text: text, At: field.NewPath("at")})
		}
		var out []string
		for _, e := range a.Judge(list) {
			out = append(out, e.Error())
		}
		return strings.Join(out, "\n")
	}
	many := func(n int) (out []string) {
		for range n {
			out = append(out, each)
		}
		return out
	}
	for _, c := range []struct {
		use   expressions.Use
		texts []string
		want  string
	}{
		{expressions.DeviceSelector, []string{each}, ""},
		{expressions.DeviceSelector, many(1000), ""},
		{expressions.DeviceSelector, []string{nested}, tooMuch},
		{expressions.DeviceSelector, []string{nested, each, nested}, tooMuch + "\n" + tooMuch},
		{expressions.DerivedValue, []string{each}, ""},
		{expressions.DerivedValue, []string{nested}, tooMuch},
		{expressions.DerivedValue, many(1000), tooMuch},
	} {
		if got := judge(c.use, c.texts...); got != c.want {
			t.Errorf("%d of %q: %q, want %q", len(c.texts), c.texts[0], got, c.want)
		}
	}
}
