package admission

import (
	"crypto/x509"
	"encoding/pem"
	"errors"

	apiequality "k8s.io/apimachinery/pkg/api/equality"
)

func equal(a, b any) bool { return apiequality.Semantic.DeepEqual(a, b) }

// requestedGroups returns the groups, which are the organizations of the subject, in a PEM
// certificate request.
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
