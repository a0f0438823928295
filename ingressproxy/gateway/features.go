package gateway

import (
	gw "sigs.k8s.io/gateway-api/apis/v1"
)

// supportedFeatures are the features that Keelson's classes report, by their names in the Gateway
// API conformance suite. The suite tests every reported feature. docs/reference/gateway.md lists
// the unsupported features. The specification requires alphabetical order.
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

// classFeatures returns the features for the status of a class. A class that is not accepted has
// none.
func classFeatures(refused *problem) (out []gw.SupportedFeature) {
	if refused != nil {
		return nil
	}
	for _, name := range supportedFeatures {
		out = append(out, gw.SupportedFeature{Name: name})
	}
	return out
}
