package celquantity

import (
	"strings"
	"testing"
	"time"

	"github.com/google/cel-go/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

// Quantities that take long to parse are rejected, in variables and constants; all others are
// parsed.
func TestQuantitiesInExpressions(t *testing.T) {
	base, err := environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()).Extend(
		environment.VersionedOptions{
			IntroducedVersion: environment.DefaultCompatibilityVersion(),
			EnvOptions:        []cel.EnvOption{cel.Variable("self", cel.StringType)},
		})
	if err != nil {
		t.Fatal(err)
	}
	env := base.StoredExpressionsEnv()
	for _, c := range []struct {
		rule, self, fails string
		want              bool
	}{
		{"quantity(self).isGreaterThan(quantity('1'))", "1Gi", "", true},
		{"quantity(self).isGreaterThan(quantity('1'))", "1e-9", "", false},
		{"quantity(self).isGreaterThan(quantity('0'))", strings.Repeat("9", 900_000),
			"quantity has 900000 bytes, the limit is 128", false},
		{"quantity(self).isGreaterThan(quantity('0'))", "1e-2000000000",
			"the exponent of the quantity has 10 digits", false},
		{"quantity('1e-2000000000').isInteger()", "", "the exponent of the quantity has 10 digits", false},
		{"isQuantity(self)", "1e-2000000000", "", false},
		{"isQuantity(self)", strings.Repeat("9", 900_000), "", false},
		{"isQuantity(self)", "200k", "", true},
		{"quantity(self).isGreaterThan(quantity('0'))", "x", "quantities must match", false},
	} {
		ast, issues := env.Compile(c.rule)
		if issues.Err() != nil {
			t.Fatalf("%s: %v", c.rule, issues.Err())
		}
		began := time.Now()
		var text string
		var out any
		program, err := env.Program(ast)
		if err == nil {
			value, details, failed := program.Eval(map[string]any{"self": c.self})
			if err = failed; err == nil {
				out = value.Value()
				if cost := details.ActualCost(); cost == nil || *cost == 0 {
					t.Errorf("%s has no cost", c.rule)
				}
			}
		}
		if err != nil {
			text = err.Error()
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("%s of %d bytes took %v", c.rule, len(c.self), took)
		}
		if c.fails == "" && (err != nil || out != c.want) || !strings.Contains(text, c.fails) {
			t.Errorf("%s of %.20s: %v, %v; want %v, %q", c.rule, c.self, out, err, c.want, c.fails)
		}
	}
}
