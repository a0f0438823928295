package kinds

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// The sentences of the commonest rules.
var (
	notSubdomain = validation.IsDNS1123Subdomain("A")[0]
	notLabel     = validation.IsDNS1123Label("A")[0]
)

// bad is an object and all that is wrong with it, a line for each cause, whole and in order. None means that it is valid.
type bad struct{ text, want string }

// invalidText is the cause of a value that breaks a rule.
func invalidText(at, value, why string) string {
	return at + `: Invalid value: "` + value + `": ` + why
}

func lines(errs field.ErrorList) string {
	var out []string
	for _, e := range errs {
		out = append(out, e.Error())
	}
	return strings.Join(out, "\n")
}

// refuses compares what is wrong with new objects with what is expected.
func refuses[P api.Object](t *testing.T, cases ...bad) {
	t.Helper()
	for _, c := range cases {
		o := load[P](t, c.text)
		if got := lines(All().ByType(o).Judge(o, nil)); got != c.want {
			t.Errorf("%s\n got  %s\n want %s", c.text, strings.ReplaceAll(got, "\n", "\n      "), strings.ReplaceAll(c.want, "\n", "\n      "))
		}
	}
}

// changes compares what is wrong with a change with what is expected, and the generation after it. sub is the facet, ""
// for the object itself.
type changed[P api.Object] struct {
	sub        string
	change     func(P)
	want       string
	generation int64
}

func changes[P api.Object](t *testing.T, text string, cases ...changed[P]) {
	t.Helper()
	for i, c := range cases {
		old := load[P](t, text)
		k := All().ByType(old)
		if k.PrepareCreate != nil {
			status := old.DeepCopyObject().(P)
			k.PrepareCreate(old)
			if k.Ops.SetStatus != nil {
				k.Ops.SetStatus(old, status)
			}
		}
		old.SetResourceVersion("1")
		was := old.DeepCopyObject().(P)
		obj := old.DeepCopyObject().(P)
		c.change(obj)
		var errs field.ErrorList
		if s := k.Subresources[c.sub]; s != nil {
			s.PrepareUpdate(obj, old)
			errs = s.ValidateUpdate(obj, old)
		} else {
			if k.Default != nil {
				k.Default(obj)
			}
			if k.PrepareUpdate != nil {
				k.PrepareUpdate(obj, old)
			}
			errs = append(k.Judge(obj, old), k.ValidateUpdate(obj, old)...)
		}
		if got := lines(errs); got != c.want || obj.GetGeneration() != c.generation {
			t.Errorf("change %d (%s): generation %d, want %d\n got  %s\n want %s", i, c.sub, obj.GetGeneration(), c.generation, got, c.want)
		}
		if !fieldrules.SemanticEqual(old, was) {
			t.Errorf("change %d (%s): the stored object was changed", i, c.sub)
		}
	}
}
