package wire

import (
	"context"
	"crypto/x509"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
)

// CallerNode returns the node name in the caller's verified client certificate.
func CallerNode(ctx context.Context) (string, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "fleet: the connection has no peer")
	}
	t, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(t.State.VerifiedChains) == 0 {
		return "", status.Error(codes.Unauthenticated, "fleet: a client certificate is required")
	}
	node, ok := CertificateNode(t.State.VerifiedChains[0][0])
	if !ok {
		return "", status.Error(codes.PermissionDenied, "fleet: the client certificate is not a node's")
	}
	return node, nil
}

// CallerCertificate returns the caller's client certificate. It may be called only after CallerNode
// has succeeded.
func CallerCertificate(ctx context.Context) *x509.Certificate {
	p, _ := peer.FromContext(ctx)
	return p.AuthInfo.(credentials.TLSInfo).State.VerifiedChains[0][0]
}

// CertificateNode returns the name of the node that a client certificate identifies. ok is false if
// the certificate does not identify a node.
func CertificateNode(c *x509.Certificate) (node string, ok bool) {
	node, ok = strings.CutPrefix(c.Subject.CommonName, api.NodeUserPrefix)
	return node, ok && node != "" && slices.Contains(c.Subject.Organization, api.GroupNodes)
}

// CallerAddress returns the IP address from which the caller is connected, or the zero address.
func CallerAddress(ctx context.Context) netip.Addr {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return netip.Addr{}
	}
	a, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return netip.Addr{}
	}
	return a.Addr().Unmap().WithZone("")
}
