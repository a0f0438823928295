package gateway

import (
	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// supportedFeatures are the features that the status of Keelson's GatewayClasses lists. Their names
// are those of the Gateway API conformance suite, which tests every listed feature. The
// specification requires alphabetical order. docs/reference/gateway.md lists the unsupported
// features.
var supportedFeatures = []gw.FeatureName{
	"GRPCRoute",
	"GRPCRouteNamedRouteRule",
	"Gateway",
	"GatewayAddressEmpty",
	"GatewayHTTPListenerIsolation",
	"GatewayHTTPSListenerDetectMisdirectedRequests",
	"GatewayPort8080",
	"GatewayStaticAddresses",
	"HTTPRoute",
	"HTTPRoute303RedirectStatusCode",
	"HTTPRoute307RedirectStatusCode",
	"HTTPRoute308RedirectStatusCode",
	"HTTPRouteBackendProtocolH2C",
	"HTTPRouteBackendProtocolWebSocket",
	"HTTPRouteBackendRequestHeaderModification",
	"HTTPRouteBackendTimeout",
	"HTTPRouteDestinationPortMatching",
	"HTTPRouteHostRewrite",
	"HTTPRouteMethodMatching",
	"HTTPRouteNamedRouteRule",
	"HTTPRouteParentRefPort",
	"HTTPRoutePathRedirect",
	"HTTPRoutePathRewrite",
	"HTTPRoutePortRedirect",
	"HTTPRouteQueryParamMatching",
	"HTTPRouteRequestMirror",
	"HTTPRouteRequestMultipleMirrors",
	"HTTPRouteRequestPercentageMirror",
	"HTTPRouteRequestTimeout",
	"HTTPRouteResponseHeaderModification",
	"HTTPRouteSchemeRedirect",
	"ReferenceGrant",
}

// classFeatures returns supportedFeatures for the status of a GatewayClass, or nil if the class is
// not accepted because of the problem refused.
func classFeatures(refused *problem) (out []gw.SupportedFeature) {
	if refused != nil {
		return nil
	}
	for _, name := range supportedFeatures {
		out = append(out, gw.SupportedFeature{Name: name})
	}
	return out
}
