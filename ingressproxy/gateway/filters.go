package gateway

import (
	"fmt"
	"slices"

	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// httpFilters translates the filters of a rule of route r, or of one of the rule's backends, to
// those of the proxy. ruleIndex is the index of the rule, and field the path of the filters in the
// rule; both are for messages. The targets of mirror filters are added to rule. It returns a
// problem if a filter is not supported.
func (w *World) httpFilters(r *Route, ruleIndex int, field string, filters []gw.HTTPRouteFilter, rule *translatedRule) (
	out route.Filters, p *problem,
) {
	seen := map[gw.HTTPRouteFilterType]bool{}
	for i, f := range filters {
		where := fmt.Sprintf("%s[%d]", field, i)
		if seen[f.Type] && f.Type != gw.HTTPRouteFilterRequestMirror {
			return out, problemf(gw.RouteReasonIncompatibleFilters, "%s: an earlier filter also has type %s", where,
				f.Type)
		}
		seen[f.Type] = true
		switch {
		case f.Type == gw.HTTPRouteFilterRequestHeaderModifier && f.RequestHeaderModifier != nil:
			out.Request = headerChanges(f.RequestHeaderModifier)
		case f.Type == gw.HTTPRouteFilterResponseHeaderModifier && f.ResponseHeaderModifier != nil:
			out.Response = headerChanges(f.ResponseHeaderModifier)
		case f.Type == gw.HTTPRouteFilterRequestRedirect && f.RequestRedirect != nil:
			out.Redirect, p = translateRedirect(f.RequestRedirect)
		case f.Type == gw.HTTPRouteFilterURLRewrite && f.URLRewrite != nil:
			out.Rewrite = &route.Rewrite{Host: stringOr(f.URLRewrite.Hostname, "")}
			out.Rewrite.Path, p = translatePathChange(f.URLRewrite.Path)
		case f.Type == gw.HTTPRouteFilterRequestMirror && f.RequestMirror != nil:
			path := fmt.Sprintf("spec.rules[%d].%s", ruleIndex, where)
			if m, ok := w.translateMirror(r, path, f.RequestMirror, rule); ok {
				out.Mirrors = append(out.Mirrors, m)
			}
		default:
			p = problemf(gw.RouteReasonUnsupportedValue, "filters of type %s are not supported", f.Type)
		}
		if p != nil {
			return out, problemf(p.reason, "%s: %s", where, p.message)
		}
	}
	if out.Redirect != nil && out.Rewrite != nil {
		return out, problemf(gw.RouteReasonIncompatibleFilters, "%s: RequestRedirect and URLRewrite exclude each other",
			field)
	}
	return out, nil
}

func headerChanges(f *gw.HTTPHeaderFilter) route.Headers {
	list := func(in []gw.HTTPHeader) []route.Header {
		var out []route.Header
		for _, h := range in {
			out = append(out, route.Header{Name: string(h.Name), Value: h.Value})
		}
		return out
	}
	return route.Headers{Remove: slices.Clone(f.Remove), Set: list(f.Set), Add: list(f.Add)}
}

func translateRedirect(f *gw.HTTPRequestRedirectFilter) (out *route.Redirect, p *problem) {
	out = &route.Redirect{Host: stringOr(f.Hostname, ""), Scheme: stringOr(f.Scheme, "")}
	if s := out.Scheme; s != "" && s != "http" && s != "https" {
		return out, problemf(gw.RouteReasonUnsupportedValue, "scheme %q is not supported", s)
	}
	if f.Port != nil {
		out.Port = uint16(*f.Port)
	}
	if f.StatusCode != nil {
		if out.Status = *f.StatusCode; !slices.Contains([]int{301, 302, 303, 307, 308}, out.Status) {
			return out, problemf(gw.RouteReasonUnsupportedValue, "statusCode %d is not a redirect", out.Status)
		}
	}
	out.Path, p = translatePathChange(f.Path)
	return out, p
}

func translatePathChange(m *gw.HTTPPathModifier) (*route.PathChange, *problem) {
	if m == nil {
		return nil, nil
	}
	switch {
	case m.Type == gw.FullPathHTTPPathModifier && m.ReplaceFullPath != nil:
		return &route.PathChange{Value: *m.ReplaceFullPath}, nil
	case m.Type == gw.PrefixMatchHTTPPathModifier && m.ReplacePrefixMatch != nil:
		return &route.PathChange{Value: *m.ReplacePrefixMatch, Prefix: true}, nil
	}
	return nil, problemf(gw.RouteReasonUnsupportedValue, "path of type %q is not supported", m.Type)
}

// checkPrefixReplacement returns a problem if f replaces a path prefix although one of the matches
// is not of type PathPrefix.
func checkPrefixReplacement(f route.Filters, matches []route.Match) *problem {
	var changes []*route.PathChange
	if f.Redirect != nil {
		changes = append(changes, f.Redirect.Path)
	}
	if f.Rewrite != nil {
		changes = append(changes, f.Rewrite.Path)
	}
	for _, c := range changes {
		if c != nil && c.Prefix && slices.ContainsFunc(matches, func(m route.Match) bool {
			return m.Path.Kind != route.Prefix
		}) {
			return problemf(gw.RouteReasonUnsupportedValue, "ReplacePrefixMatch needs matches of type PathPrefix")
		}
	}
	return nil
}

// translateMirror translates the mirror filter f of route r, and adds its target to rule. If the
// backend reference of f cannot be resolved, it records the problem under the path field, and ok is
// false.
func (w *World) translateMirror(r *Route, field string, f *gw.HTTPRequestMirrorFilter, rule *translatedRule) (
	out route.Mirror, ok bool,
) {
	t, p := w.resolveBackendRef(r, f.BackendRef)
	if p != nil {
		r.recordUnresolvedRef(field, p)
		return out, false
	}
	rule.targets = append(rule.targets, t)
	out.Pool = t.poolKey()
	switch {
	case f.Fraction != nil:
		out.Numerator, out.Denominator = nonNegative(f.Fraction.Numerator), 100
		if f.Fraction.Denominator != nil {
			out.Denominator = nonNegative(*f.Fraction.Denominator)
		}
	case f.Percent != nil:
		out.Numerator, out.Denominator = nonNegative(*f.Percent), 100
	}
	return out, true
}
