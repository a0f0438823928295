package session

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"time"

	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// maxTrustBytes is the maximum size of the CA certificates (PEM) that parseTrustedCAs accepts.
const maxTrustBytes = 64 << 10

// maxRenewalJitter bounds the random delay before a requested renewal, so that the nodes of a
// cluster do not renew at the same moment.
const maxRenewalJitter = 500 * time.Millisecond

// trustedCAs are the CA certificates of the cluster that this node trusts.
type trustedCAs struct {
	pool         *x509.CertPool
	certificates []*x509.Certificate
	// time of the Trust message with these CAs, for ordering the messages of different replicas; 0
	// = from enrollment
	sinceUnixMilli int64
	signerID       string // authorityID of the CA that signs new certificates; "" = no replica has reported it
}

// trustedSinceLine is the format of the first line of caFile, which contains
// trustedCAs.sinceUnixMilli. PEM decoders skip the line.
const trustedSinceLine = "believed since %d ms\n"

// parseTrustedCAs reads the content of caFile, or the CA certificates of an enrollment response. It
// returns an error if the text is larger than maxTrustBytes or has no CA certificate.
func parseTrustedCAs(text []byte) (b trustedCAs, err error) {
	if len(text) > maxTrustBytes {
		return b, fmt.Errorf("the cluster CA has %d bytes, more than the limit of %d", len(text), maxTrustBytes)
	}
	_, _ = fmt.Fscanf(bytes.NewReader(text), trustedSinceLine, &b.sinceUnixMilli) // the line may be missing
	b.pool = x509.NewCertPool()
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil || !c.IsCA {
			continue
		}
		b.certificates = append(b.certificates, c)
		b.pool.AddCert(c)
	}
	if len(b.certificates) == 0 {
		return b, errors.New("the cluster CA holds no certificate")
	}
	return b, nil
}

// authorityID returns the ID of a CA certificate: the first 8 bytes of the SHA-256 of its public
// key. The control plane uses the same ID.
func authorityID(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:8])
}

// issuerID returns the authorityID of the trusted CA that issued leaf, or "" if no trusted CA
// issued it.
func (b trustedCAs) issuerID(leaf *x509.Certificate) string {
	for _, ca := range b.certificates {
		if bytes.Equal(leaf.AuthorityKeyId, ca.SubjectKeyId) && leaf.CheckSignatureFrom(ca) == nil {
			return authorityID(ca)
		}
	}
	return ""
}

func (id *identity) currentCAs() trustedCAs {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.trusted
}

func (id *identity) rootPool() *x509.CertPool { return id.currentCAs().pool }

// isIssuedByOldCA reports whether leaf was issued by a CA that no longer signs new certificates. It
// returns false if leaf is nil or the signing CA is unknown.
func (id *identity) isIssuedByOldCA(leaf *x509.Certificate) bool {
	b := id.currentCAs()
	return leaf != nil && b.signerID != "" && b.issuerID(leaf) != b.signerID
}

// requestRenewal makes runRenewals renew the node's certificate before its renewal time. It does
// not wait for the renewal.
func (id *identity) requestRenewal() { id.renewNow.Send() }

// setServerUntrusted records whether the server of the latest connection presented a certificate
// that no trusted CA issued.
func (id *identity) setServerUntrusted(untrusted bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	id.serverUntrusted = untrusted
}

func (id *identity) isServerUntrusted() bool {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.serverUntrusted
}

// applyTrust replaces the node's trusted CAs with the CAs in t, a message from a replica. It
// ignores a message that is older than the current CAs. It stores the new CAs in caFile before they
// are used, so that they survive a restart.
func (n *nodeCredentials) applyTrust(t *fleetv1.Trust) error {
	id := n.id
	was := id.currentCAs()
	if t.SinceUnixMilli < was.sinceUnixMilli {
		return nil // the message is older than the current CAs
	}
	next, err := parseTrustedCAs(t.CaPem)
	if err != nil {
		return fmt.Errorf("cluster CA sent by the replica: %w", err)
	}
	next.sinceUnixMilli, next.signerID = t.SinceUnixMilli, t.Signs
	if next.sinceUnixMilli != was.sinceUnixMilli || !next.pool.Equal(was.pool) {
		text := append(fmt.Appendf(nil, trustedSinceLine, next.sinceUnixMilli), t.CaPem...)
		if err := writeFile(filepath.Join(n.cfg.StateDir, caFile), text); err != nil {
			return fmt.Errorf("store the cluster CA: %w", err)
		}
	}
	id.mu.Lock()
	id.trusted = next
	id.mu.Unlock()
	if !next.pool.Equal(was.pool) {
		n.log.Info("the cluster's CA has changed", "trusted", authorityIDs(next.certificates), "signs", next.signerID)
	}
	if id.isIssuedByOldCA(id.currentCertificate().Leaf) {
		id.requestRenewal()
	}
	if id.isIssuedByOldCA(n.signedServingCertificate()) {
		n.serving.renewNow.Send()
	}
	return nil
}

// authoritiesReport returns the message that reports to a replica which CAs this node trusts, its
// signed certificates, and which CAs issued them.
func (n *nodeCredentials) authoritiesReport() *fleetv1.Authorities {
	b := n.id.currentCAs()
	out := &fleetv1.Authorities{Believes: authorityIDs(b.certificates)}
	for _, c := range n.signedCertificates() {
		if by := b.issuerID(c.leaf); by != "" {
			out.Shows = append(out.Shows, by)
		}
		out.Certificates = append(out.Certificates, &fleetv1.NodeCertificate{Use: c.use, Key: authorityID(c.leaf),
			BeginsUnix: c.leaf.NotBefore.Unix(), ExpiresUnix: c.leaf.NotAfter.Unix()})
	}
	return out
}

// signedServingCertificate returns the certificate of the node's HTTPS server if the cluster signed
// it, or nil.
func (n *nodeCredentials) signedServingCertificate() *x509.Certificate {
	leaf := n.serving.currentLeaf()
	if leaf == nil || bytes.Equal(leaf.RawIssuer, leaf.RawSubject) {
		return nil
	}
	return leaf
}

func authorityIDs(all []*x509.Certificate) (out []string) {
	for _, c := range all {
		out = append(out, authorityID(c))
	}
	return out
}

// clockCheckInterval is how often waitUntilTime compares its deadline with the wall clock.
const clockCheckInterval = time.Hour

// waitUntilTime waits until now() reaches the deadline, or until renewNow receives a value. After
// such a value, it also waits a random delay of at most maxRenewalJitter. It returns an error only
// if ctx ends. A machine without a battery-backed clock boots with an old time, which is corrected
// later. If deadline has no monotonic reading, such a correction is noticed within
// clockCheckInterval.
func waitUntilTime(ctx context.Context, deadline time.Time, now func() time.Time, renewNow <-chan struct{}) error {
	for {
		left := deadline.Sub(now())
		timer := time.NewTimer(min(left, clockCheckInterval))
		select {
		case <-timer.C:
			if left <= clockCheckInterval {
				return nil
			}
		case <-renewNow:
			timer.Stop()
			return wait.Delay(ctx, time.Duration(rand.Int64N(int64(maxRenewalJitter))))
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}
