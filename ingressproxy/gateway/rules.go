package gateway

import (
	"fmt"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"time"

	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
)

// translatedRule is a rule of an HTTPRoute or GRPCRoute in the proxy's form, without hosts, and the
// Service ports that it uses.
type translatedRule struct {
	route.Rule
	targets     []backendTarget
	unmatchable bool // the matches of the rule could not be translated, so that the rule cannot be served
}

// droppedRuleStatus is the HTTP status of the response to a request for a rule of a route that
// cannot be translated. The proxy then contacts no backend.
const droppedRuleStatus = http.StatusInternalServerError

// translateRoute translates the rules of route r to the proxy's form and stores them in r. It
// records rules that are not supported in the dropped field of r. If no rule can be translated, r
// is refused.
func (w *World) translateRoute(r *Route) {
	if d := r.common.UseDefaultGateways; d != "" && d != gw.GatewayDefaultScopeNone {
		r.refused = problemf(gw.RouteReasonUnsupportedValue,
			"spec.useDefaultGateways: default Gateways are not supported; leave it out")
		return
	}
	count := 0
	var first *problem
	each := func(i int, name string, out translatedRule, p *problem) {
		count++
		out.Name = fmt.Sprintf("%s/%s/%s/%s", kindPrefix(r.kind), r.meta.Namespace, r.meta.Name, name)
		if p != nil {
			r.dropped = append(r.dropped, fmt.Sprintf("%d (%s)", i, p.message))
			if first == nil {
				first = problemf(p.reason, "spec.rules[%d]: %s", i, p.message)
			}
			// Keep the matches with an error status, so that no other rule receives these requests.
			out = translatedRule{Rule: route.Rule{Name: out.Name, Matches: out.Matches, Answer: droppedRuleStatus},
				unmatchable: out.unmatchable}
		}
		r.rules = append(r.rules, out)
	}
	if r.HTTP != nil {
		for i := range r.HTTP.Spec.Rules {
			spec := &r.HTTP.Spec.Rules[i]
			out, p := w.translateHTTPRule(r, i, spec)
			each(i, stringOr(spec.Name, fmt.Sprint(i)), out, p)
		}
	} else {
		for i := range r.GRPC.Spec.Rules {
			spec := &r.GRPC.Spec.Rules[i]
			out, p := w.translateGRPCRule(r, i, spec)
			each(i, stringOr(spec.Name, fmt.Sprint(i)), out, p)
		}
	}
	if len(r.dropped) == count && first != nil {
		r.refused = first
	}
}

func kindPrefix(kind string) string {
	if kind == httpRoute {
		return "httproute"
	}
	return "grpcroute"
}

func (w *World) translateHTTPRule(r *Route, at int, spec *gw.HTTPRouteRule) (out translatedRule, p *problem) {
	if out.Matches, p = httpMatches(spec.Matches); p != nil {
		out.unmatchable = true
		return out, p
	}
	if spec.Retry != nil {
		return out, problemf(gw.RouteReasonUnsupportedValue, "retry is not supported; leave it out")
	}
	if spec.SessionPersistence != nil {
		return out, problemf(gw.RouteReasonUnsupportedValue, "sessionPersistence is not supported; leave it out")
	}
	if out.Timeouts, p = translateTimeouts(spec.Timeouts); p != nil {
		return out, p
	}
	if out.Filters, p = w.httpFilters(r, at, "filters", spec.Filters, &out); p != nil {
		return out, p
	}
	if p = checkPrefixReplacement(out.Filters, out.Matches); p != nil {
		return out, p
	}
	for i, b := range spec.BackendRefs {
		filters, p := w.httpFilters(r, at, fmt.Sprintf("backendRefs[%d].filters", i), b.Filters, &out)
		if p == nil {
			p = checkPrefixReplacement(filters, out.Matches)
		}
		if p != nil {
			return out, p
		}
		w.addBackend(r, at, i, b.BackendRef, filters, &out)
	}
	return out, nil
}

// addBackend adds a backend to the translated rule out. ruleIndex and backendIndex are the indexes
// of the rule and the backend, for messages. If the backend reference cannot be resolved, the
// backend's share of the requests gets an error status.
func (w *World) addBackend(
	r *Route, ruleIndex, backendIndex int, ref gw.BackendRef, filters route.Filters, out *translatedRule,
) {
	weight := uint32(1)
	if ref.Weight != nil {
		weight = uint32(max(0, *ref.Weight))
	}
	b := route.Backend{Weight: weight, Filters: filters}
	t, p := w.resolveBackendRef(r, ref.BackendObjectReference)
	if p != nil {
		r.recordUnresolvedRef(fmt.Sprintf("spec.rules[%d].backendRefs[%d]", ruleIndex, backendIndex), p)
		b.Answer = http.StatusInternalServerError
		if r.kind == grpcRoute {
			b.Answer = http.StatusServiceUnavailable // gRPC clients map this status to UNAVAILABLE
		}
	} else {
		b.Pool = t.poolKey()
		out.targets = append(out.targets, t)
	}
	out.Backends = append(out.Backends, b)
}

// recordUnresolvedRef records p as the problem of the first reference in route r that cannot be
// resolved. Later calls have no effect.
func (r *Route) recordUnresolvedRef(field string, p *problem) {
	if r.unresolvedRef == nil {
		r.unresolvedRef = problemf(p.reason, "%s: %s", field, p.message)
	}
}

func httpMatches(matches []gw.HTTPRouteMatch) ([]route.Match, *problem) {
	var out []route.Match
	for i, m := range matches {
		var to route.Match
		if m.Path != nil {
			kind, value := stringOr(m.Path.Type, string(gw.PathMatchPathPrefix)), "/"
			if m.Path.Value != nil {
				value = *m.Path.Value
			}
			switch gw.PathMatchType(kind) {
			case gw.PathMatchExact, gw.PathMatchPathPrefix:
				if gw.PathMatchType(kind) == gw.PathMatchExact {
					to.Path.Kind = route.Exact
				}
				decoded, err := url.PathUnescape(value)
				if err != nil {
					return nil, problemf(gw.RouteReasonUnsupportedValue, "matches[%d].path: %v", i, err)
				}
				to.Path.Value = decoded
			case gw.PathMatchRegularExpression:
				if err := route.CheckRegex(value); err != nil {
					return nil, problemf(gw.RouteReasonUnsupportedValue, "matches[%d].path: %v", i, err)
				}
				to.Path = route.PathMatch{Kind: route.Regex, Value: value}
			default:
				return nil, problemf(gw.RouteReasonUnsupportedValue, "matches[%d].path.type: %q is not known", i, kind)
			}
		}
		if m.Method != nil {
			to.Method = string(*m.Method)
		}
		for _, h := range m.Headers {
			v, p := valueMatch(fmt.Sprintf("matches[%d].headers", i), string(h.Name), h.Value,
				stringOr(h.Type, "Exact"))
			if p != nil {
				return nil, p
			}
			v.Name = http.CanonicalHeaderKey(v.Name)
			to.Headers = addOnce(to.Headers, v)
		}
		for _, q := range m.QueryParams {
			v, p := valueMatch(fmt.Sprintf("matches[%d].queryParams", i), string(q.Name), q.Value,
				stringOr(q.Type, "Exact"))
			if p != nil {
				return nil, p
			}
			to.Query = addOnce(to.Query, v)
		}
		out = append(out, to)
	}
	return out, nil
}

// addOnce appends match v to list unless list already has a match with the same name.
func addOnce(list []route.ValueMatch, v route.ValueMatch) []route.ValueMatch {
	if slices.ContainsFunc(list, func(have route.ValueMatch) bool { return have.Name == v.Name }) {
		return list
	}
	return append(list, v)
}

func valueMatch(field, name, value, kind string) (route.ValueMatch, *problem) {
	v := route.ValueMatch{Name: name, Value: value}
	switch kind {
	case "Exact":
	case "RegularExpression":
		v.Regex = true
		if err := route.CheckRegex(value); err != nil {
			return v, problemf(gw.RouteReasonUnsupportedValue, "%s %s: %v", field, name, err)
		}
	default:
		return v, problemf(gw.RouteReasonUnsupportedValue, "%s %s: type %q is not known", field, name, kind)
	}
	return v, nil
}

func translateTimeouts(t *gw.HTTPRouteTimeouts) (out route.Timeouts, p *problem) {
	if t == nil {
		return out, nil
	}
	read := func(name string, d *gw.Duration) time.Duration {
		if d == nil || p != nil {
			return 0
		}
		out, err := time.ParseDuration(string(*d))
		if err != nil || out < 0 {
			p = problemf(gw.RouteReasonUnsupportedValue, "timeouts.%s: %q is not a duration", name, *d)
		}
		return out
	}
	out.Request, out.Backend = read("request", t.Request), read("backendRequest", t.BackendRequest)
	return out, p
}

// grpcPath returns the path match for gRPC method match m. The path of a gRPC call is
// /service/method. A match with both parts precedes a match with the service only. That match
// precedes a match with the method only, and a match with neither is last.
func grpcPath(m *gw.GRPCMethodMatch) (route.PathMatch, *problem) {
	if m == nil {
		return route.PathMatch{Kind: route.LateRegex, Value: ".*"}, nil
	}
	service, method := stringOr(m.Service, ""), stringOr(m.Method, "")
	switch kind := stringOr(m.Type, string(gw.GRPCMethodMatchExact)); gw.GRPCMethodMatchType(kind) {
	case gw.GRPCMethodMatchExact:
		switch {
		case service != "" && method != "":
			return route.PathMatch{Kind: route.Exact, Value: "/" + service + "/" + method}, nil
		case service != "":
			return route.PathMatch{Value: "/" + service}, nil
		case method != "":
			return route.PathMatch{Kind: route.LateRegex, Value: "/[^/]+/" + regexp.QuoteMeta(method)}, nil
		}
		return route.PathMatch{Kind: route.LateRegex, Value: ".*"}, nil
	case gw.GRPCMethodMatchRegularExpression:
		part := func(s string) string {
			if s == "" {
				return "[^/]+"
			}
			return "(?:" + s + ")"
		}
		value := "/" + part(service) + "/" + part(method)
		for _, s := range []string{service, method, value} {
			if err := route.CheckRegex(s); err != nil {
				return route.PathMatch{}, problemf(gw.RouteReasonUnsupportedValue, "method: %v", err)
			}
		}
		if service == "" {
			return route.PathMatch{Kind: route.LateRegex, Value: value}, nil
		}
		return route.PathMatch{Kind: route.Regex, Value: value}, nil
	default:
		return route.PathMatch{}, problemf(gw.RouteReasonUnsupportedValue, "method.type: %q is not known", kind)
	}
}

func (w *World) translateGRPCRule(r *Route, at int, spec *gw.GRPCRouteRule) (out translatedRule, p *problem) {
	matches := spec.Matches
	if len(matches) == 0 {
		matches = []gw.GRPCRouteMatch{{}}
	}
	for i, m := range matches {
		to := route.Match{}
		if to.Path, p = grpcPath(m.Method); p != nil {
			out.unmatchable = true
			return out, problemf(p.reason, "matches[%d].%s", i, p.message)
		}
		for _, h := range m.Headers {
			v, p := valueMatch(fmt.Sprintf("matches[%d].headers", i), string(h.Name), h.Value,
				stringOr(h.Type, "Exact"))
			if p != nil {
				out.unmatchable = true
				return out, p
			}
			v.Name = http.CanonicalHeaderKey(v.Name)
			to.Headers = addOnce(to.Headers, v)
		}
		out.Matches = append(out.Matches, to)
	}
	if spec.SessionPersistence != nil {
		return out, problemf(gw.RouteReasonUnsupportedValue, "sessionPersistence is not supported; leave it out")
	}
	if out.Filters, p = w.httpFilters(r, at, "filters", httpFiltersOf(spec.Filters), &out); p != nil {
		return out, p
	}
	for i, b := range spec.BackendRefs {
		filters, p := w.httpFilters(r, at, fmt.Sprintf("backendRefs[%d].filters", i), httpFiltersOf(b.Filters), &out)
		if p != nil {
			return out, p
		}
		w.addBackend(r, at, i, b.BackendRef, filters, &out)
	}
	if len(out.Backends) == 0 {
		out.Answer = http.StatusServiceUnavailable
	}
	return out, nil
}

// httpFiltersOf converts filters of a GRPCRoute to the HTTPRoute filters with the same types.
func httpFiltersOf(filters []gw.GRPCRouteFilter) []gw.HTTPRouteFilter {
	out := make([]gw.HTTPRouteFilter, len(filters))
	for i, f := range filters {
		out[i] = gw.HTTPRouteFilter{Type: gw.HTTPRouteFilterType(f.Type),
			RequestHeaderModifier:  f.RequestHeaderModifier,
			ResponseHeaderModifier: f.ResponseHeaderModifier, RequestMirror: f.RequestMirror,
			ExtensionRef: f.ExtensionRef}
	}
	return out
}

// nonNegative converts n to a numerator or denominator of a mirror; negative values become 0.
func nonNegative(n int32) uint32 { return uint32(min(max(0, int64(n)), math.MaxInt32)) }
