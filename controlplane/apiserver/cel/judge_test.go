package cel

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds"
)

// Each expression is compiled for what it is for, with what it may refer to.
func TestJudge(t *testing.T) {
	a := New().Admission()
	at := field.NewPath("at")
	variable := kinds.Expression{Use: kinds.Variable, Name: "v", Text: "object.metadata.name", At: at}
	for _, c := range []struct {
		use    kinds.Use
		text   string
		params bool
		want   string // what the cause says; "" = it is right
	}{
		{kinds.MatchCondition, "request.operation == 'CREATE'", false, ""},
		{kinds.MatchCondition, "variables.v == 'a'", false, "undeclared reference to 'variables'"},
		{kinds.MatchCondition, "1", false, "must evaluate to bool but got int"},
		{kinds.MatchCondition, "1 +", false, "compilation failed: ERROR: <input>:1:4: Syntax error"},
		{kinds.Validation, "variables.v == 'a'", false, ""},
		{kinds.Validation, "variables.w == 'a'", false, "undefined field 'w'"},
		{kinds.Validation, "params.data.a == 'a'", false, "undeclared reference to 'params'"},
		{kinds.Validation, "params.data.a == 'a'", true, ""},
		{kinds.Validation, "authorizer.path('/healthz').check('get').allowed()", false, ""},
		{kinds.Message, "'no ' + string(variables.v)", false, ""},
		{kinds.Message, "1", false, "must evaluate to string but got int"},
		{kinds.Message, "authorizer.path('/healthz').check('get').reason()", false, "undeclared reference to 'authorizer'"},
		{kinds.AuditAnnotation, "null", false, ""},
		{kinds.AuditAnnotation, "true", false, "but got bool"},
		{kinds.PatchMutation, "[JSONPatch{op: 'add', path: '/a', value: 1}]", false, ""},
		{kinds.PatchMutation, "[1]", false, "must evaluate to"},
		{kinds.ApplyMutation, "Object{spec: Object.spec{replicas: 1}}", false, ""},
		{kinds.ApplyMutation, "'a'", false, "must evaluate to"},
		{kinds.DeviceSelector, "device.driver == 'x' && device.attributes['x'].model == 'a' && device.capacity['x'].memory.isGreaterThan(quantity('1Gi'))", false, ""},
		{kinds.DeviceSelector, "device.colour == 'red'", false, "undefined field 'colour'"},
		{kinds.DeviceSelector, "object.a", false, "undeclared reference to 'object'"},
		{kinds.DeviceSelector, "device.attributes['x'].ready", false, ""},
		{kinds.DeviceSelector, "device.driver", false, "must evaluate to bool or the unknown type, not string"},
		{kinds.DeviceSelector, "cel.bind(x, device.attributes['x'], x.fast && x.near)", false, ""},
		{kinds.DeviceSelector, "device.attributes['x'].models.includes('a') && device.attributes['x'].version.isLessThan(semver('1.2.3'))", false, ""},
		{kinds.DeviceSelector, "device.attributes['x'].models.all(a, a.startsWith('v'))", false, ""},
		{kinds.DerivedValue, "device.attributes['x'].model", false, ""},
	} {
		errs := a.Judge([]kinds.Expression{{Use: variable.Use, Name: variable.Name, Text: variable.Text, At: at, Params: c.params}, {Use: c.use, Text: c.text, Params: c.params, At: at}})
		switch {
		case c.want == "" && len(errs) == 0:
		case c.want == "" || len(errs) != 1 || !strings.Contains(errs[0].Detail, c.want) || errs[0].BadValue != c.text:
			t.Errorf("%s: got %v, want %q", c.text, errs, c.want)
		}
	}
	bad := a.Judge([]kinds.Expression{{Use: kinds.Variable, Name: "v", Text: "1 +", At: at}})
	if len(bad) != 1 || !strings.HasPrefix(bad[0].Detail, "compilation failed: ") {
		t.Error(bad)
	}
}

// What takes too long to evaluate for each device is refused, and so are derived values that take too long together.
func TestDeviceCost(t *testing.T) {
	a := New().Admission()
	each := "device.attributes.all(a, device.attributes.all(b, true))"
	nested := "device.attributes.all(a, device.attributes.all(b, device.attributes.all(c, device.attributes.all(d, true))))"
	const tooMuch = "at: Forbidden: too complex, exceeds cost limit"
	judge := func(use kinds.Use, texts ...string) string {
		var list []kinds.Expression
		for _, text := range texts {
			list = append(list, kinds.Expression{Use: use, Text: text, At: field.NewPath("at")})
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
		use   kinds.Use
		texts []string
		want  string
	}{
		{kinds.DeviceSelector, []string{each}, ""},
		{kinds.DeviceSelector, many(1000), ""},
		{kinds.DeviceSelector, []string{nested}, tooMuch},
		{kinds.DeviceSelector, []string{nested, each, nested}, tooMuch + "\n" + tooMuch},
		{kinds.DerivedValue, []string{each}, ""},
		{kinds.DerivedValue, []string{nested}, tooMuch},
		{kinds.DerivedValue, many(1000), tooMuch},
	} {
		if got := judge(c.use, c.texts...); got != c.want {
			t.Errorf("%d of %q: %q, want %q", len(c.texts), c.texts[0], got, c.want)
		}
	}
}
