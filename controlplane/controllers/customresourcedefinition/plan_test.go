package customresourcedefinition

import (
	"testing"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	v1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var now = metav1.NewTime(time.Unix(1000, 0))

func definition(group, plural, kind string, short ...string) *v1.CustomResourceDefinition {
	return &v1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group},
		Spec: v1.CustomResourceDefinitionSpec{Group: group, Names: v1.CustomResourceDefinitionNames{
			Plural: plural, Singular: plural + "x", Kind: kind, ListKind: kind + "List", ShortNames: short,
		}},
	}
}

func accepted(c *v1.CustomResourceDefinition) *v1.CustomResourceDefinition {
	c.Status = DefinitionStatus(c, UsedNames{}, now)
	return c
}

// Names belong to the first definition in a group that requests them; the remaining free names are
// accepted.
func TestNames(t *testing.T) {
	first := accepted(definition("a.example.com", "widgets", "Widget", "w"))
	for name, c := range map[string]struct {
		of      *v1.CustomResourceDefinition
		reason  string
		message string
	}{
		"its own":       {first, "NoConflicts", "no conflicts found"},
		"another group": {definition("b.example.com", "widgets", "Widget", "w"), "NoConflicts", "no conflicts found"},
		"plural":        {definition("a.example.com", "w", "Other"), "PluralConflict", `"w" is already in use`},
		"kind": {definition("a.example.com", "others", "Widget"), "ListKindConflict",
			`"WidgetList" is already in use`},
		"short names": {definition("a.example.com", "others", "Other", "widgets", "w"), "ShortNamesConflict",
			`["widgets" is already in use, "w" is already in use]`},
	} {
		got := DefinitionStatus(c.of, FindUsedNames(c.of, []*v1.CustomResourceDefinition{first}), now)
		next := &v1.CustomResourceDefinition{Status: got}
		cond := apihelpers.FindCRDCondition(next, v1.NamesAccepted)
		if cond.Reason != c.reason || cond.Message != c.message {
			t.Errorf("%s: %s: %s", name, cond.Reason, cond.Message)
		}
		if ok := c.reason == "NoConflicts"; apihelpers.IsCRDConditionTrue(next, v1.Established) != ok {
			t.Errorf("%s: established is not %v", name, ok)
		}
	}
}

// An established definition stays established when later names are refused, and keeps its accepted
// names.
func TestEstablishedStays(t *testing.T) {
	c := accepted(definition("a.example.com", "widgets", "Widget"))
	c.Spec.Names.ShortNames = []string{"w"}
	c.Status = DefinitionStatus(c, UsedNames{Resources: map[string]bool{"w": true}}, metav1.NewTime(time.Unix(2000, 0)))
	if !apihelpers.IsCRDConditionTrue(c, v1.Established) || apihelpers.IsCRDConditionTrue(c, v1.NamesAccepted) ||
		c.Status.AcceptedNames.ShortNames != nil || c.Status.AcceptedNames.Plural != "widgets" {
		t.Errorf("%+v", c.Status)
	}
	if at := apihelpers.FindCRDCondition(c, v1.Established).LastTransitionTime; !at.Equal(&now) {
		t.Errorf("established since %v", at)
	}
}

func TestApproval(t *testing.T) {
	for annotation, want := range map[string]string{
		"": "MissingAnnotation", "nonsense": "InvalidAnnotation", "unapproved, experimental": "UnapprovedAnnotation",
		"https://github.com/kubernetes/kubernetes/pull/1": "ApprovedAnnotation",
	} {
		c := definition("a.k8s.io", "widgets", "Widget")
		if annotation != "" {
			c.Annotations = map[string]string{v1.KubeAPIApprovedAnnotation: annotation}
		}
		if cond := apihelpers.FindCRDCondition(accepted(c), v1.KubernetesAPIApprovalPolicyConformant); cond == nil ||
			cond.Reason != want {
			t.Errorf("%q: %+v", annotation, cond)
		}
	}
	if cond := apihelpers.FindCRDCondition(accepted(definition("a.example.com", "widgets", "Widget")),
		v1.KubernetesAPIApprovalPolicyConformant); cond != nil {
		t.Errorf("an unprotected group has %+v", cond)
	}
}
