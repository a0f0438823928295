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

// maxTrust bounds the authorities that a node is told of, in bytes.
const maxTrust = 64 << 10

// hurryWithin is the time within which the nodes of a cluster have their certificates signed anew: not all in one moment.
const hurryWithin = 500 * time.Millisecond

// believed are the authorities of the cluster as a node knows them.
type believed struct {
	pool  *x509.CertPool
	all   []*x509.Certificate
	since int64  // orders what replicas say; 0 = what it enrolled with
	signs string // by which new certificates are; "" = nobody has said
}

// sinceLine stands before the certificates of the file, where readers of PEM pass it over.
const sinceLine = "believed since %d ms\n"

// parseBelieved reads what believed.text or an enrolment gave.
func parseBelieved(text []byte) (b believed, err error) {
	if len(text) > maxTrust {
		return b, fmt.Errorf("the cluster CA takes %d bytes, at most %d are read", len(text), maxTrust)
	}
	_, _ = fmt.Fscanf(bytes.NewReader(text), sinceLine, &b.since) // it may be missing
	b.pool = x509.NewCertPool()
	for block, rest := pem.Decode(text); block != nil; block, rest = pem.Decode(rest) {
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil || !c.IsCA {
			continue
		}
		b.all = append(b.all, c)
		b.pool.AddCert(c)
	}
	if len(b.all) == 0 {
		return b, errors.New("the cluster CA holds no certificate")
	}
	return b, nil
}

// authorityID names an authority as the control plane does.
func authorityID(c *x509.Certificate) string {
	sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
	return hex.EncodeToString(sum[:8])
}

// by is the authority by which a certificate is; "" when it is by none of these.
func (b believed) by(leaf *x509.Certificate) string {
	for _, ca := range b.all {
		if bytes.Equal(leaf.AuthorityKeyId, ca.SubjectKeyId) && leaf.CheckSignatureFrom(ca) == nil {
			return authorityID(ca)
		}
	}
	return ""
}

func (id *identity) believes() believed {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.believed
}

func (id *identity) roots() *x509.CertPool { return id.believes().pool }

// outdated says of a certificate that it is by another authority than the one that signs now. nil is no certificate.
func (id *identity) outdated(leaf *x509.Certificate) bool {
	b := id.believes()
	return leaf != nil && b.signs != "" && b.by(leaf) != b.signs
}

// quicken has the certificate renewed now.
func (id *identity) quicken() { poke(id.hurry) }

// met remembers whether the server that was met last is by none that is believed.
func (id *identity) met(stranger bool) {
	id.mu.Lock()
	defer id.mu.Unlock()
	id.strange = stranger
}

func (id *identity) metStranger() bool {
	id.mu.RLock()
	defer id.mu.RUnlock()
	return id.strange
}

// believe takes what a replica says of the authorities: on disk first, so that a node that is begun again knows them.
func (s *Session) believe(t *fleetv1.Trust) error {
	id := s.id
	was := id.believes()
	if t.SinceUnixMilli < was.since {
		return nil // the replica is behind others
	}
	next, err := parseBelieved(t.CaPem)
	if err != nil {
		return fmt.Errorf("what the replica says of the cluster's CA: %w", err)
	}
	next.since, next.signs = t.SinceUnixMilli, t.Signs
	if next.since != was.since || !next.pool.Equal(was.pool) {
		text := append(fmt.Appendf(nil, sinceLine, next.since), t.CaPem...)
		if err := writeFile(filepath.Join(s.cfg.StateDir, caFile), text); err != nil {
			return fmt.Errorf("keep the cluster's CA: %w", err)
		}
	}
	id.mu.Lock()
	id.believed = next
	id.mu.Unlock()
	if !next.pool.Equal(was.pool) {
		s.log.Info("the cluster's CA has changed", "believed", idsOf(next.all), "signs", next.signs)
	}
	if id.outdated(id.current().Leaf) {
		id.quicken()
	}
	if id.outdated(s.signedServing()) {
		poke(s.serving.hurry)
	}
	return nil
}

// authorities are those by which the node goes, as it tells replicas.
func (s *Session) authorities() *fleetv1.Authorities {
	b := s.id.believes()
	out := &fleetv1.Authorities{Believes: idsOf(b.all)}
	for _, c := range s.certificates() {
		if by := b.by(c.leaf); by != "" {
			out.Shows = append(out.Shows, by)
		}
		out.Certificates = append(out.Certificates, &fleetv1.NodeCertificate{Use: c.use, Key: authorityID(c.leaf),
			BeginsUnix: c.leaf.NotBefore.Unix(), ExpiresUnix: c.leaf.NotAfter.Unix()})
	}
	return out
}

// signedServing is the certificate of the node's server that the cluster has signed; nil while there is none.
func (s *Session) signedServing() *x509.Certificate {
	leaf := s.serving.current()
	if leaf == nil || bytes.Equal(leaf.RawIssuer, leaf.RawSubject) {
		return nil
	}
	return leaf
}

func idsOf(all []*x509.Certificate) (out []string) {
	for _, c := range all {
		out = append(out, authorityID(c))
	}
	return out
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// lookAgain is after how long the wall clock is asked again while something waits for a time of it.
const lookAgain = time.Hour

// delayUntil waits until it is at, for less when there is a hurry. A machine without a clock of its own boots years ago and is told the
// time later: where at is a time of the wall clock, without the reading of another, whoever waits for it notices within the hour.
func delayUntil(ctx context.Context, at time.Time, now func() time.Time, hurry <-chan struct{}) error {
	for {
		left := at.Sub(now())
		timer := time.NewTimer(min(left, lookAgain))
		select {
		case <-timer.C:
			if left <= lookAgain {
				return nil
			}
		case <-hurry:
			timer.Stop()
			return wait.Delay(ctx, time.Duration(rand.Int64N(int64(hurryWithin))))
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		}
	}
}
