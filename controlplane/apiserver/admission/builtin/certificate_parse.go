package builtin

import (
	"crypto/x509"
	"encoding/pem"
	"errors"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

func equalObjects(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// requestedGroups returns the groups that a PEM certificate request asks for. They are the
// organizations of its subject.
func requestedGroups(request []byte) ([]string, error) {
	block, _ := pem.Decode(request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" {
		return nil, errors.New("PEM block type must be CERTIFICATE REQUEST")
	}
	r, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return r.Subject.Organization, nil
}
