// Package keywatch follows the value of one key of the store.
package keywatch

import (
	"context"
	"errors"

	"keelson.dev/keelson/raftstore"
)

// Run calls apply with the value of key in this replica's applied state, if the key exists, and
// then with each later value. It may call apply again with the last value that apply has received,
// or with the value before it. Deletions are ignored. Run calls synced once, when the first value
// has been applied or the key does not exist.
//
// Run returns the first error of apply, or the error that ended the watch. It returns nil if ctx
// has ended.
func Run(ctx context.Context, store raftstore.Store, key string, apply func(value []byte) error, synced func()) error {
	w, err := store.Watch(ctx, key, 0) // before the read, so that no change is missed
	if err != nil {
		return err
	}
	defer w.Stop()
	item, _, err := store.Get(ctx, key, raftstore.ReadOptions{Local: true})
	switch {
	case err == nil:
		err = apply(item.Value)
	case errors.Is(err, raftstore.ErrNotFound):
		err = nil
	}
	if err != nil {
		return err
	}
	synced()
	for batch := range w.C() {
		for _, event := range batch.Events {
			if event.Kind != raftstore.EventPut || event.Item.Key != key { // longer keys with the same prefix
				continue
			}
			if err := apply(event.Item.Value); err != nil {
				return err
			}
		}
	}
	return w.Err()
}
