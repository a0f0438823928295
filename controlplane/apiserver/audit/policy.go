package audit

import (
	"fmt"
	"os"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// Policy selects the requests that are recorded and the level of their records. The first matching
// rule decides.
type Policy struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`
	Rules             []Rule  `json:"rules"`
	OmitStages        []Stage `json:"omitStages,omitempty"`
	OmitManagedFields bool    `json:"omitManagedFields,omitempty"`

	// changes is set for the default policy only. A request that is not a write is then recorded
	// only if it was rejected.
	changes bool
}

// Rule matches a request if each of its non-empty lists matches the request.
type Rule struct {
	Level             Level       `json:"level"`
	Users             []string    `json:"users,omitempty"`
	UserGroups        []string    `json:"userGroups,omitempty"`
	Verbs             []string    `json:"verbs,omitempty"`
	Resources         []Resources `json:"resources,omitempty"`
	Namespaces        []string    `json:"namespaces,omitempty"`
	NonResourceURLs   []string    `json:"nonResourceURLs,omitempty"`
	OmitStages        []Stage     `json:"omitStages,omitempty"`
	OmitManagedFields *bool       `json:"omitManagedFields,omitempty"`
}

// Resources selects resources of an API group by patterns: "pods", "pods/log", "pods/*",
// "*/status", "*". An empty list selects all resources of the group.
type Resources struct {
	Group         string   `json:"group,omitempty"`
	Resources     []string `json:"resources,omitempty"`
	ResourceNames []string `json:"resourceNames,omitempty"`
}

// Default returns the policy that is used without a policy file. It records write requests and
// rejected requests, without bodies.
func Default() *Policy {
	return &Policy{
		Rules:   []Rule{{Level: LevelMetadata}},
		changes: true, OmitStages: []Stage{StageRequestReceived},
	}
}

// Received makes the default policy also record requests when they are received, before they are
// performed. A request that cannot be recorded can then be rejected. It does not change a policy
// from a file.
func (p *Policy) Received() {
	if p.changes {
		p.OmitStages = nil
	}
}

// LoadPolicy reads a policy file. For an empty path, it returns the policy Default.
func LoadPolicy(path string) (*Policy, error) {
	if path == "" {
		return Default(), nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the audit policy: %w", err)
	}
	p, err := parsePolicy(data)
	if err != nil {
		return nil, fmt.Errorf("audit policy %s: %w", path, err)
	}
	return p, nil
}

func parsePolicy(data []byte) (*Policy, error) {
	var p Policy
	if err := yaml.UnmarshalStrict(data, &p); err != nil {
		return nil, err
	}
	if p.Kind != "Policy" || p.APIVersion != groupVersion {
		return nil, fmt.Errorf("it is a %q of %q; want a Policy of %s", p.Kind, p.APIVersion, groupVersion)
	}
	errs := validStages(p.OmitStages, field.NewPath("omitStages"))
	for i := range p.Rules {
		errs = append(errs, p.Rules[i].validateRule(field.NewPath("rules").Index(i))...)
	}
	return &p, errs.ToAggregate()
}

func validStages(list []Stage, path *field.Path) (errs field.ErrorList) {
	for i, s := range list {
		if !slices.Contains(stages, s) {
			errs = append(errs, field.NotSupported(path.Index(i), s, stages))
		}
	}
	return errs
}

func (r *Rule) validateRule(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if !slices.Contains(levels, r.Level) {
		errs = append(errs, field.NotSupported(path.Child("level"), r.Level, levels))
	}
	if len(r.NonResourceURLs) > 0 && len(r.Resources)+len(r.Namespaces) > 0 {
		errs = append(errs, field.Invalid(path.Child("nonResourceURLs"), r.NonResourceURLs,
			"rules cannot apply to both regular resources and non-resource URLs"))
	}
	for i, u := range r.NonResourceURLs {
		if u != "*" && (!strings.HasPrefix(u, "/") || strings.Contains(strings.TrimSuffix(u, "*"), "*")) {
			errs = append(errs, field.Invalid(path.Child("nonResourceURLs").Index(i), u,
				"want '*', or a path from '/' with a '*' at its end at most"))
		}
	}
	for i, x := range r.Resources {
		if len(x.ResourceNames) > 0 && len(x.Resources) == 0 {
			errs = append(errs, field.Invalid(path.Child("resources").Index(i).Child("resourceNames"), x.ResourceNames,
				"using resourceNames requires at least one resource"))
		}
		if strings.Contains(x.Group, "/") {
			errs = append(errs, field.Invalid(path.Child("resources").Index(i).Child("group"), x.Group,
				"want a group without its version"))
		}
	}
	return append(errs, validStages(r.OmitStages, path.Child("omitStages"))...)
}

// verdict is what a policy determines for one request: the level of its record and what the record
// omits.
type verdict struct {
	level             Level
	omit              []Stage
	omitManagedFields bool
}

// verdictFor returns the verdict of the first rule that matches. A request without a matching rule
// is not recorded.
func (p *Policy) verdictFor(a *Attributes) verdict {
	for i := range p.Rules {
		r := &p.Rules[i]
		if !r.matchesRequest(a) {
			continue
		}
		v := verdict{level: r.Level, omit: p.OmitStages, omitManagedFields: p.OmitManagedFields}
		if len(r.OmitStages) > 0 {
			v.omit = slices.Concat(p.OmitStages, r.OmitStages)
		}
		if r.OmitManagedFields != nil {
			v.omitManagedFields = *r.OmitManagedFields
		}
		return v
	}
	return verdict{level: LevelNone}
}

func (r *Rule) matchesRequest(a *Attributes) bool {
	switch {
	case len(r.Users) > 0 && !slices.Contains(r.Users, a.User.Name),
		len(r.UserGroups) > 0 && !slices.ContainsFunc(a.User.Groups,
			func(g string) bool { return slices.Contains(r.UserGroups, g) }),
		len(r.Verbs) > 0 && !slices.Contains(r.Verbs, a.Verb) && !slices.Contains(r.Verbs, "*"):
		return false
	case len(r.Namespaces) > 0 || len(r.Resources) > 0:
		return r.matchesResource(a)
	case len(r.NonResourceURLs) > 0:
		return a.Resource == "" && slices.ContainsFunc(r.NonResourceURLs, func(u string) bool {
			prefix, some := strings.CutSuffix(u, "*")
			return u == a.Path || some && strings.HasPrefix(a.Path, prefix)
		})
	}
	return true
}

func (r *Rule) matchesResource(a *Attributes) bool {
	if a.Resource == "" || len(r.Namespaces) > 0 && !slices.Contains(r.Namespaces, a.Namespace) {
		return false
	}
	return len(r.Resources) == 0 || slices.ContainsFunc(r.Resources, func(x Resources) bool {
		if x.Group != a.Group || len(x.ResourceNames) > 0 && !slices.Contains(x.ResourceNames, a.Name) {
			return false
		}
		return len(x.Resources) == 0 || slices.ContainsFunc(x.Resources, a.matchesPattern)
	})
}

// matchesPattern reports whether the resource pattern of a rule, such as "pods/*", matches the
// requested resource.
func (a *Attributes) matchesPattern(word string) bool {
	resource, sub, divided := strings.Cut(word, "/")
	switch {
	case word == "*":
		return true
	case !divided:
		return resource == a.Resource && a.Subresource == ""
	}
	return a.Subresource != "" && (resource == "*" || resource == a.Resource) && (sub == "*" || sub == a.Subresource)
}
