package session

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wakeup"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// servingFile stores the key and the certificate of the node's HTTPS server, in the state folder.
const servingFile = "serving.pem"

// servingCertificate is the current certificate of the node's HTTPS server.
type servingCertificate struct {
	mu       sync.Mutex
	cert     *tls.Certificate
	renewNow wakeup.Signal // a value requests a new signature before the renewal time
}

var _ agent.ServerTrust = (*Session)(nil)

// ServingCertificate returns the current certificate of the node's HTTPS server. It implements
// agent.ServerTrust.
func (s *Session) ServingCertificate() (*tls.Certificate, error) {
	return s.creds.currentServingCertificate()
}

// currentServingCertificate returns the server certificate that the cluster signed. Before the
// cluster has signed one, it returns a self-signed certificate.
func (n *nodeCredentials) currentServingCertificate() (*tls.Certificate, error) {
	n.serving.mu.Lock()
	defer n.serving.mu.Unlock()
	if n.serving.cert == nil {
		cert, err := newSelfSignedCertificate(n.cfg.NodeName, n.nodeIPs(), time.Now())
		if err != nil {
			return nil, fmt.Errorf("the server's certificate: %w", err)
		}
		n.serving.cert = cert
	}
	return n.serving.cert, nil
}

func (n *nodeCredentials) nodeIPs() (out []net.IP) {
	for _, a := range n.cfg.NodeIPs {
		if ip := net.ParseIP(a); ip != nil {
			out = append(out, ip)
		}
	}
	return out
}

// ClientCAs returns the CAs that the node's HTTPS server trusts for client certificates. It
// implements agent.ServerTrust.
func (s *Session) ClientCAs() *x509.CertPool {
	select {
	case <-s.creds.identified:
		return s.creds.id.rootPool()
	default:
		return nil
	}
}

// ReviewAccess asks a replica to authenticate and authorize a request to the node's HTTPS server.
// It tries one replica after another until a replica responds. It implements agent.ServerTrust.
func (s *Session) ReviewAccess(ctx context.Context, q agent.AccessReview) (agent.AccessDecision, error) {
	last := errors.New("no replica is known")
	for _, l := range s.replicas.sessionCandidates(time.Now()) {
		got, err := fleetv1.NewFleetClient(l.conn).Review(ctx, &fleetv1.ReviewRequest{
			Token: q.Token, User: q.User, Groups: q.Groups, Certificate: q.Certificate, Verb: q.Verb,
			Subresources: q.Subresources})
		if err == nil {
			return agent.AccessDecision{Authenticated: got.Authenticated, User: got.User,
				Allowed: got.Authenticated && got.Allowed, Reason: got.Reason}, nil
		}
		last = err
		if status.Code(err) == codes.Unimplemented {
			last = fmt.Errorf("the replica at %s is of a release that cannot authenticate clients of the node's "+
				"server: upgrade it", l.address)
		}
		if ctx.Err() != nil {
			break
		}
	}
	return agent.AccessDecision{}, fmt.Errorf("%w: %w", agent.ErrReviewUnavailable, last)
}

// runServingCertificate keeps the certificate of the node's HTTPS server signed by the cluster,
// until ctx ends. It calls sign at start, after two thirds of the certificate's lifetime, and when
// renewNow receives a value. sign returns the expiry time of the new certificate. A failure is
// retried with backoff.
func (n *nodeCredentials) runServingCertificate(
	ctx context.Context, now func() time.Time, sign func(context.Context) (until time.Time, err error),
) error {
	if err := n.loadServingCertificate(now()); err != nil {
		n.log.Warn("starting without the stored certificate of the server", "err", err)
	}
	delay := backoff.Backoff{Min: time.Second, Max: 5 * time.Minute, Jitter: 0.5}
	for {
		until, err := sign(ctx)
		pause := delay.Next()
		next := now().Add(pause)
		if err == nil {
			n.wake()                                                 // reports the issuing CA
			if !n.id.isIssuedByOldCA(n.signedServingCertificate()) { // otherwise the replica that signed it lags behind
				delay.Reset()
				// without a monotonic reading, because the wall clock may be set
				next = now().Round(0).Add(max(until.Sub(now())/3*2, time.Minute))
			}
		} else if ctx.Err() == nil {
			n.log.Warn("the certificate of the node's server was not signed, will retry", "in",
				pause.Round(time.Second), "err", err)
		}
		if err := waitUntilTime(ctx, next, now, n.serving.renewNow); err != nil {
			return err
		}
	}
}

// currentLeaf returns the certificate that the node's HTTPS server uses, or nil if the server has
// no certificate yet.
func (s *servingCertificate) currentLeaf() *x509.Certificate {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cert == nil {
		return nil
	}
	return s.cert.Leaf
}

func (n *nodeCredentials) signServingCertificate(ctx context.Context) (until time.Time, err error) {
	req, err := newSigningRequest(n.cfg.NodeName, n.nodeIPs()...)
	if err != nil {
		return until, err
	}
	err = errors.New("no replica is connected")
	for _, l := range n.replicas.sessionCandidates(time.Now()) {
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		var got *fleetv1.ServingResponse
		got, err = fleetv1.NewFleetClient(l.conn).SignServing(call, &fleetv1.ServingRequest{CsrDer: req.der})
		cancel()
		if err != nil {
			continue
		}
		both := append(append([]byte(nil), got.CertificatePem...), req.key...)
		cert, err := n.installServingCertificate(both, time.Now())
		if err != nil {
			return until, err
		}
		if err := writeFile(filepath.Join(n.cfg.StateDir, servingFile), both); err != nil {
			n.log.Warn("the certificate of the node's server is not stored", "err", err)
		}
		return cert.NotAfter, nil
	}
	return until, fmt.Errorf("certificate of the server of node %s: %w", n.cfg.NodeName, err)
}

// loadServingCertificate loads the server certificate of an earlier agent process from servingFile.
// The HTTPS server uses it until a replica signs a new certificate. A missing file is not an error.
func (n *nodeCredentials) loadServingCertificate(now time.Time) error {
	data, err := os.ReadFile(filepath.Join(n.cfg.StateDir, servingFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		_, err = n.installServingCertificate(data, now)
	}
	return err
}

func (n *nodeCredentials) installServingCertificate(keyAndCert []byte, now time.Time) (*x509.Certificate, error) {
	cert, err := tls.X509KeyPair(keyAndCert, keyAndCert)
	if err != nil {
		return nil, fmt.Errorf("the server's certificate: %w", err)
	}
	if cert.Leaf == nil {
		if cert.Leaf, err = x509.ParseCertificate(cert.Certificate[0]); err != nil {
			return nil, fmt.Errorf("the server's certificate: %w", err)
		}
	}
	if now.After(cert.Leaf.NotAfter) || cert.Leaf.Subject.CommonName != "system:node:"+n.cfg.NodeName {
		return nil, fmt.Errorf("the server's certificate belongs to %s and expires at %s", cert.Leaf.Subject.CommonName,
			cert.Leaf.NotAfter.Format(time.RFC3339))
	}
	n.serving.mu.Lock()
	defer n.serving.mu.Unlock()
	n.serving.cert = &cert
	return cert.Leaf, nil
}

// newSelfSignedCertificate returns a self-signed certificate for the node's HTTPS server. Like the
// kubelet, the server uses it until the cluster has signed a certificate.
func newSelfSignedCertificate(node string, addresses []net.IP, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: node + "@self-signed"},
		IPAddresses: addresses,
		NotBefore:   now.Add(-5 * time.Minute), NotAfter: now.Add(365 * 24 * time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	cert, err := tls.X509KeyPair(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}))
	return &cert, err
}
